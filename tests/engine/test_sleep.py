"""Sleep and wake-up: which memory is freed, which requests may finish, and that texts do not change."""

import asyncio
import gc
import weakref
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine import (
    Engine,
    EngineConfig,
    EngineDead,
    EngineSleeping,
    InvalidRequest,
    RequestOutput,
    SamplingParams,
)
from engine.device.weight_moves import list_tensors, move_tensors
from engine.model import load_model
from engine.model.sharding import Sharding
from engine.worker.model_runner import ModelRunner
from engine.worker.worker import Worker, WorkerState
from grammar import GrammarSpec
from tests.engine.failing_step import fail_next_step
from tests.kernels.cpu.conftest import require_library
from tests.waiting import list_engine_threads, wait_until

MakeConfig = Callable[..., EngineConfig]
LONG = SamplingParams(max_tokens=300, temperature=0, ignore_eos=True, output_kind="delta")
ASKED = [
    SamplingParams(max_tokens=12, temperature=0, ignore_eos=True),
    SamplingParams(max_tokens=12, temperature=0.9, seed=7, ignore_eos=True, logprobs=2),
    SamplingParams(max_tokens=12, temperature=0.8, seed=8, grammar=GrammarSpec.regex("[a-f]{6}")),
]


async def answer_all(engine: Engine) -> list[Any]:
    outputs = []
    for params in ASKED:
        last = [output async for output in engine.generate("Once upon a time", params)][-1]
        outputs.append((last.outputs[0].token_ids, last.outputs[0].logprobs))
    return outputs


async def begin_to_sleep(engine: Engine) -> tuple[AsyncGenerator[RequestOutput], asyncio.Task[bool]]:
    """A long answer whose first piece is here, and the sleep that waits for its end."""
    stream = engine.generate("hello", LONG)
    await anext(stream)
    falling = asyncio.create_task(engine.sleep())
    await wait_until(lambda: engine.state == "falling_asleep")
    return stream, falling


def worker_of(engine: Engine) -> Worker:
    worker = engine.replicas[0].connector.host.worker  # type: ignore[attr-defined]
    assert isinstance(worker, Worker)
    return worker


@pytest.mark.parametrize("level", [1, 2])
async def test_after_a_sleep_every_answer_is_the_same(make_config: MakeConfig, level: int) -> None:
    async with Engine(make_config()) as engine:
        before = await answer_all(engine)
        for _ in range(2):
            assert await engine.sleep(level)
            assert (engine.state, engine.sleep_level) == ("sleeping", level)
            await engine.wake_up()
            assert (engine.state, engine.sleep_level) == ("ready", 0)
            assert await answer_all(engine) == before
        stats = engine.stats()
        assert (stats.num_free_blocks, stats.num_restarts) == (stats.num_blocks, 0)


@pytest.mark.parametrize(
    ("backend", "level"), [("native", 1), ("native", 2), pytest.param("sdpa", 1, marks=pytest.mark.soak)]
)
async def test_a_sleeping_engine_has_no_cache_and_no_threads(
    make_config: MakeConfig, backend: Any, level: int
) -> None:
    if backend == "native":
        require_library()
    before = list_engine_threads()
    async with Engine(make_config(attention_backend=backend, enable_native_ops=backend == "native")) as engine:
        await answer_all(engine)
        worker = worker_of(engine)
        caches = [weakref.ref(cache) for pair in worker.kv_caches for cache in pair]
        runner, model = weakref.ref(worker.runner), weakref.ref(worker.model)
        await engine.sleep(level)
        gc.collect()
        assert caches and all(cache() is None for cache in caches)
        assert (worker.state, worker.kv_caches) == (WorkerState(level), [])
        assert (runner() is None, model() is None) == (True, level == 2)
        assert engine.describe_runtime() == {"ops": "asleep", "sleep_level": level}
        await wait_until(lambda: list_engine_threads() <= before)
        assert await engine.snapshot() is None and engine.stats().num_blocks == 0


async def test_a_wake_up_without_room_for_the_cache_is_refused(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Engine(make_config(device="cpu")) as engine:
        await engine.sleep()
        with monkeypatch.context() as patch:
            patch.setattr("engine.worker.worker.measure_host_memory", lambda: (2**30, 2**10))
            with pytest.raises(EngineDead, match=r"still asleep: .* num_blocks=400: cpu cannot allocate"):
                await engine.wake_up()
        await engine.wake_up()
        assert await answer_all(engine)


async def test_running_requests_end_before_the_engine_sleeps_and_new_ones_are_refused(
    make_config: MakeConfig,
) -> None:
    async with Engine(make_config()) as engine:
        stream, falling = await begin_to_sleep(engine)
        with pytest.raises(EngineSleeping, match="falling asleep and accepts no requests"):
            await anext(engine.generate("hello", LONG))
        with pytest.raises(EngineSleeping):
            await engine.sleep()
        rest = [output async for output in stream]
        assert rest[-1].outputs[0].finish_reason == "length"
        assert await falling
        with pytest.raises(EngineSleeping, match="the engine is sleeping"):
            await anext(engine.generate("hello", LONG))


async def test_a_wake_up_calls_off_a_sleep_that_still_waits(make_config: MakeConfig) -> None:
    async with Engine(make_config()) as engine:
        stream, falling = await begin_to_sleep(engine)
        await engine.wake_up()
        assert await falling is False and engine.state == "ready"
        assert (await anext(stream)).outputs


@pytest.mark.parametrize("ends", ["at once", "later"])
async def test_a_sleep_after_one_that_was_called_off_is_another_one(make_config: MakeConfig, ends: str) -> None:
    async with Engine(make_config()) as engine:
        stream, first = await begin_to_sleep(engine)
        await engine.wake_up()
        second = asyncio.create_task(engine.sleep(drain=ends == "later"))
        async with asyncio.timeout(10):
            assert [output async for output in stream]
            assert await asyncio.gather(first, second) == [False, True]
        assert engine.state == "sleeping"
        await engine.wake_up()
        assert await answer_all(engine)


async def test_a_sleep_whose_caller_left_is_cancelled(make_config: MakeConfig) -> None:
    async with Engine(make_config()) as engine:
        stream = engine.generate("hello", replace(LONG, max_tokens=900))
        await anext(stream)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.sleep(), 0.05)
        assert engine.state == "ready"
        await stream.aclose()


@pytest.mark.parametrize("call", ["sleep", "wake_up"])
async def test_a_call_that_is_cancelled_at_any_moment_leaves_an_engine_that_works(
    make_config: MakeConfig, call: str
) -> None:
    async with Engine(make_config(mock_step_ms=0.0)) as engine:
        for num_turns in range(24):
            if call == "wake_up":
                await engine.sleep()
            task = asyncio.create_task(getattr(engine, call)())
            for _ in range(num_turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            await wait_until(lambda: engine.state in ("ready", "sleeping"))
            await engine.wake_up()
            assert [output async for output in engine.generate("hello", ASKED[0])][-1].finished


async def test_calls_during_sleeps_and_restarts_are_all_answered(make_config: MakeConfig) -> None:
    async with Engine(make_config(mock_step_ms=0.0)) as engine:
        is_over = False

        async def poll() -> int:
            num_answers = 0
            while not is_over:
                num_answers += await engine.snapshot() is not None
                await asyncio.sleep(0)
            return num_answers

        pollers = [asyncio.create_task(poll()) for _ in range(4)]
        for _ in range(12):
            await engine.sleep()
            await engine.wake_up()
        engine.replicas[0].restart()
        await wait_until(lambda: engine.replicas[0].num_restarts == 1 and engine.state == "ready")
        is_over = True
        async with asyncio.timeout(10):
            assert min(await asyncio.gather(*pollers)) > 0
            assert await engine.reset_prefix_cache()
        assert not engine._client.calls


async def test_sleeping_and_waking_twice_changes_nothing(make_config: MakeConfig) -> None:
    async with Engine(make_config()) as engine:
        await engine.wake_up()
        assert await engine.sleep(1) and await engine.sleep(1)
        with pytest.raises(InvalidRequest, match="level=2: the engine sleeps at level 1; wake it up first"):
            await engine.sleep(2)
        for level in (0, 3, True):
            with pytest.raises(InvalidRequest, match="must be an integer from 1 to 2"):
                await engine.sleep(level)


async def test_an_engine_that_cannot_wake_up_reports_the_reason_and_can_be_asked_again(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Engine(make_config()) as engine:
        before = await answer_all(engine)
        await engine.sleep(2)
        with monkeypatch.context() as patch:
            patch.setattr(Worker, "_make_caches", _explode)
            with pytest.raises(EngineDead, match=r"failed to wake up and is still asleep: .* no memory left"):
                await engine.wake_up()
        assert (engine.state, engine.error) == ("sleeping", "RuntimeError: no memory left")
        assert worker_of(engine)._loaded is None  # a second try needs the room of one model
        await engine.wake_up()
        assert engine.error is None and await answer_all(engine) == before


async def test_requests_continue_after_a_crash_before_the_engine_sleeps(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Engine(make_config()) as engine:
        stream, falling = await begin_to_sleep(engine)
        fail_next_step(monkeypatch, "no memory left")
        assert [output async for output in stream][-1].outputs[0].finish_reason == "length"
        assert await falling and engine.state == "sleeping"
        assert engine.stats().num_resumed == 1
        await engine.wake_up()
        assert await answer_all(engine)


async def test_an_engine_that_stays_down_before_it_could_sleep_says_why(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Engine(make_config(max_restarts=0)) as engine:
        stream, falling = await begin_to_sleep(engine)
        monkeypatch.setattr(ModelRunner, "execute", _explode)
        with pytest.raises(EngineDead, match=r"crashed before it could sleep: .* no memory left"):
            await falling
        with pytest.raises(EngineDead):
            await anext(stream)


@pytest.mark.parametrize("when", ["falling_asleep", "sleeping"])
async def test_an_engine_can_be_closed_in_its_sleep(make_config: MakeConfig, when: str) -> None:
    engine = Engine(make_config())
    await engine.start()
    stream = engine.generate("hello", LONG)
    await anext(stream)
    falling = asyncio.create_task(engine.sleep(drain=when == "falling_asleep"))
    await wait_until(lambda: engine.state == when)
    await engine.close()
    assert engine.state == "closed"
    if when == "falling_asleep":
        with pytest.raises(EngineDead, match="the engine was closed before it could sleep"):
            await falling
    with pytest.raises(EngineDead):
        await engine.wake_up()
    await stream.aclose()


@pytest.mark.parametrize("is_sliced", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gpt_oss"])
def test_every_weight_is_kept_once_and_moves(make_config: MakeConfig, is_sliced: bool) -> None:
    folder = make_config().model
    model = load_model(folder, sharding=Sharding(is_sliced=is_sliced))
    storages = {tensor.data_ptr(): tensor.untyped_storage() for tensor in list_tensors(model)}
    num_bytes = sum(storage.nbytes() for storage in storages.values())
    expected = sum(tensor.nbytes for tensor in load_file(f"{folder}/model.safetensors").values())
    assert expected <= num_bytes <= 1.02 * expected, "slices have a part of the bias each"


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_moved_tensors_keep_their_values_and_what_they_share(make_config: MakeConfig, quantization: Any) -> None:
    model = load_model(make_config().model, quantization=quantization)
    tensors = list_tensors(model)
    before = [(tensor, tensor.clone(), tensor.data_ptr()) for tensor in tensors]
    tied = model.embed_tokens.data_ptr() == model.lm_head.packed.data_ptr() if quantization is None else None
    # there may be no other device here: the same one is as far away as any
    move_tensors(tensors, torch.device("cpu"))
    assert [id(tensor) for tensor in list_tensors(model)] == [id(tensor) for tensor in tensors]
    for tensor, values, address in before:
        assert torch.equal(tensor, values) and tensor.stride() == values.stride()
        assert tensor.data_ptr() != address
    if quantization is None:
        assert (model.embed_tokens.data_ptr() == model.lm_head.packed.data_ptr()) is tied


def _explode(*_: object) -> None:
    raise RuntimeError("no memory left")
