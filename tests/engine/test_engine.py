"""The engine as a whole: its door, its ends, its crashes."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable

import pytest

from engine import (
    ConfigError,
    Engine,
    EngineConfig,
    EngineDead,
    EngineOverloaded,
    RequestOutput,
    SamplingParams,
)
from engine.worker.model_runner import ModelRunner
from grammar import GrammarError, GrammarSpec
from tests.waiting import wait_until

MakeConfig = Callable[..., EngineConfig]
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=900, temperature=0, ignore_eos=True, output_kind="delta")


async def complete(
    engine: Engine, prompt: str | list[int] = "hello", params: SamplingParams = GREEDY
) -> RequestOutput:
    return [output async for output in engine.generate(prompt, params)][-1]


async def test_deltas_add_up_to_the_cumulative_text(make_config: MakeConfig) -> None:
    async with Engine(make_config()) as engine:
        whole = await complete(engine)
        params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, output_kind="delta")
        deltas = [output async for output in engine.generate("hello", params)]
    parts = [delta.outputs[0] for delta in deltas if delta.outputs]
    assert "".join(part.text for part in parts) == whole.outputs[0].text
    assert [token for part in parts for token in part.token_ids] == whole.outputs[0].token_ids
    assert [part.finish_reason for part in parts if part.finish_reason] == ["length"]


async def test_a_loop_that_is_never_idle_does_not_stop_the_engine(make_config: MakeConfig) -> None:
    """With Python's own switch interval the executor got the interpreter once in seconds, or never."""
    sys.setswitchinterval(0.005)

    async def spin() -> None:
        while True:
            end = time.perf_counter() + 0.001
            while time.perf_counter() < end:
                pass
            await asyncio.sleep(0)

    async with Engine(make_config()) as engine:
        assert sys.getswitchinterval() < 0.0001
        spinning = asyncio.ensure_future(spin())
        output = await asyncio.wait_for(complete(engine), 30)
        spinning.cancel()
    assert len(output.outputs[0].token_ids) == 8


async def test_a_slow_reader_gets_merged_deltas(make_config: MakeConfig) -> None:
    async with Engine(make_config()) as engine:
        params = SamplingParams(max_tokens=50, temperature=0, ignore_eos=True, output_kind="delta")
        stream = engine.generate("hello", params)
        first = await anext(stream)
        await wait_until(lambda: engine.stats().finished["length"] == 1)
        rest = [output async for output in stream]
    assert len(rest) == 1
    assert len(first.outputs[0].token_ids) + len(rest[0].outputs[0].token_ids) == 50


async def test_a_stop_string_ends_the_request_and_frees_its_blocks(make_config: MakeConfig) -> None:
    async with Engine(make_config()) as engine:
        text = (
            (await complete(engine, params=SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)))
            .outputs[0]
            .text
        )
        stop = text[10:13]
        params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, stop=stop)  # type: ignore[arg-type]
        completion = (await complete(engine, params=params)).outputs[0]
        assert completion.text == text[: text.index(stop)]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
        await wait_until(lambda: engine.stats().num_free_blocks == engine.stats().num_blocks)


async def test_logprobs_are_those_of_the_sampled_tokens(make_config: MakeConfig) -> None:
    async with Engine(make_config()) as engine:
        params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True, logprobs=3)
        completion = (await complete(engine, params=params)).outputs[0]
    assert completion.logprobs is not None
    assert [entry.token.token_id for entry in completion.logprobs] == completion.token_ids
    assert all(entry.token.rank == 1 and len(entry.top) == 3 for entry in completion.logprobs)
    total = sum(entry.token.logprob for entry in completion.logprobs)
    assert completion.cumulative_logprob == pytest.approx(total)


async def test_prompt_logprobs_cover_the_prompt_also_in_chunks(make_config: MakeConfig) -> None:
    prompt = [3 + number % 100 for number in range(75)]
    params = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=1)
    found = []
    for budget in (1024, 32):
        async with Engine(make_config(max_num_batched_tokens=budget)) as engine:
            found.append((await complete(engine, prompt, params)).prompt_logprobs or [])
    whole, chunked = found
    assert [None if entry is None else entry.token.token_id for entry in whole] == [None, *prompt[1:]]
    assert len(chunked) == len(whole)
    for one, other in zip(whole[1:], chunked[1:], strict=True):
        assert one is not None and other is not None
        assert one.token.logprob == pytest.approx(other.token.logprob, abs=1e-4)


async def test_n_completions_share_a_prompt_and_end_together(make_config: MakeConfig) -> None:
    async with Engine(make_config()) as engine:
        output = await complete(engine, params=SamplingParams(n=4, seed=1, max_tokens=12, ignore_eos=True))
    assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 4
    assert all(completion.finish_reason == "length" for completion in output.outputs)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (lambda: GrammarSpec.regex("(unclosed"), "unclosed"),
        (lambda: GrammarSpec.json_schema({"properties": {"a": {"$dynamicRef": "#x"}}}), "/properties/a"),
        (lambda: GrammarSpec.ebnf("root ::= missing"), "missing"),
    ],
)
async def test_a_bad_grammar_fails_only_its_own_request(
    spec: Callable[[], GrammarSpec], message: str, make_config: MakeConfig
) -> None:
    async with Engine(make_config()) as engine:
        running = asyncio.create_task(complete(engine, params=GREEDY))
        with pytest.raises(GrammarError, match=message):
            await complete(engine, params=SamplingParams(grammar=spec()))
        assert (await running).finished
        assert (await complete(engine, params=SamplingParams(grammar=GrammarSpec.choice(["yes"])))).outputs[
            0
        ].text == "yes"


async def test_a_full_queue_refuses_with_a_hint(make_config: MakeConfig) -> None:
    async with Engine(make_config(max_num_waiting=2, max_num_seqs=1)) as engine:
        streams = [engine.generate("hello", LONG) for _ in range(3)]
        for stream in streams[:1]:
            await anext(stream)
        waiting = [asyncio.create_task(anext(stream)) for stream in streams[1:]]
        await wait_until(lambda: engine.stats().num_waiting == 2)
        with pytest.raises(EngineOverloaded, match="2 requests are waiting and at most 2 may"):
            await complete(engine)
        for task in waiting:
            task.cancel()


async def test_abort_by_id_ends_the_stream_with_reason_abort(make_config: MakeConfig) -> None:
    async with Engine(make_config()) as engine:
        stream = engine.generate("hello", LONG, "mine")
        await anext(stream)
        await engine.abort("mine")
        last = [output async for output in stream][-1]
        assert last.outputs[0].finish_reason == "abort"


async def test_a_crash_fails_what_is_in_flight_and_the_engine_serves_again(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with Engine(make_config()) as engine:
        before = (await complete(engine)).outputs[0].token_ids
        queried = engine.stats().prefix_cache_queries
        streams = [engine.generate("hello", LONG) for _ in range(3)]
        for stream in streams:
            await anext(stream)
        with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
            patch.setattr(ModelRunner, "execute", _explode)
            for stream in streams:
                with pytest.raises(EngineDead, match="the engine crashed: the device is on fire"):
                    async for _ in stream:
                        pass
        assert engine.error == "RuntimeError: the device is on fire"
        await wait_until(lambda: engine.state == "ready")
        assert len(caplog.records) == 1
        assert (await complete(engine)).outputs[0].token_ids == before
        assert engine.stats().num_restarts == 1
        assert engine.stats().prefix_cache_queries == 5 * queried  # three of them before the crash
        assert engine.stats().num_free_blocks == engine.stats().num_blocks


async def test_an_engine_that_keeps_crashing_stays_down(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Engine(make_config(max_restarts=1)) as engine:
        monkeypatch.setattr(ModelRunner, "execute", _explode)
        for _ in range(2):
            with pytest.raises(EngineDead):
                await complete(engine)
            await wait_until(lambda: engine.state in ("ready", "dead"))
        assert engine.state == "dead"
        with pytest.raises(EngineDead, match="the engine is dead"):
            await complete(engine)


def _explode(*_: object) -> None:
    raise RuntimeError("the device is on fire")


async def test_a_start_that_cannot_work_raises_a_config_error(make_config: MakeConfig) -> None:
    engine = Engine(make_config(max_model_len=10**6))
    with pytest.raises(ConfigError, match="max_model_len=1000000 exceeds the checkpoint's 1024"):
        await engine.start()
    await engine.close()


async def test_a_closed_engine_says_so(make_config: MakeConfig) -> None:
    engine = Engine(make_config())
    with pytest.raises(EngineDead, match="the engine is new"):
        await complete(engine)
    async with engine:
        pass
    with pytest.raises(EngineDead, match="the engine is closed"):
        await complete(engine)
