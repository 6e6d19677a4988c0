"""Request ids: their owners, when they can be reused, and which requests an abort ends.

Requests that begin or end during admission, during a crash, or at the same time.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from engine import (
    Engine,
    EngineConfig,
    EngineDead,
    EngineError,
    EngineOverloaded,
    InvalidRequest,
    LoRARequest,
    RequestOutput,
    SamplingParams,
)
from engine.actors.scheduler_actor import SchedulerActor
from engine.cluster.core_host import CoreHost
from engine.config_fields import DEMO_MODEL
from engine.front.adapter_catalog import AdapterCatalog
from engine.input.input_processor import InputProcessor
from engine.input.special_token_escaper import SpecialTokenEscaper
from engine.input.tokenizer import Tokenizer
from engine.messages import AbortRequest, AddRequest
from engine.wire import frames
from engine.worker.model_runner import ModelRunner
from grammar import CompiledGrammar, GrammarCompiler, GrammarError, GrammarSpec, Matcher
from tests.waiting import wait_until

MakeConfig = Callable[..., EngineConfig]
SHORT = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=900, temperature=0, ignore_eos=True, output_kind="delta")
FOUR = SamplingParams(n=4, max_tokens=900, ignore_eos=True, output_kind="delta")


async def read(engine: Engine, params: SamplingParams, name: str) -> RequestOutput:
    return [output async for output in engine.generate("hello", params, name)][-1]


async def is_free(engine: Engine, name: str) -> bool:
    try:
        await read(engine, SHORT, name)
    except InvalidRequest as error:
        assert error.param == "request_id"
        return False
    return True


async def test_the_reader_of_a_finished_request_leaves_its_successor_alone(make_config: MakeConfig) -> None:
    async with Engine(make_config()) as engine:
        first = engine.generate("hello", SHORT, "a")
        while not (await anext(first)).finished:
            pass
        second = engine.generate("hello", LONG, "a")
        await anext(second)
        await first.aclose()
        for _ in range(5):
            assert not (await anext(second)).finished
        assert not await is_free(engine, "a"), "the first took its name along"
        await second.aclose()


async def test_the_deadline_of_a_finished_request_leaves_its_successor_alone(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_timer, timers = Engine._start_timer, []

    def keep_timer(*arguments: Any) -> asyncio.TimerHandle | None:
        timers.append(start_timer(*arguments))
        return timers[-1]

    monkeypatch.setattr(Engine, "_start_timer", keep_timer)
    async with Engine(make_config()) as engine:
        first = engine.generate("hello", SHORT, "a", deadline_s=600.0)
        while not (await anext(first)).finished:
            pass
        second = engine.generate("hello", replace(LONG, max_tokens=50), "a")
        await anext(second)
        assert timers[0] is not None
        timers[0]._run()
        assert [output async for output in second][-1].outputs[0].finish_reason == "length"
        await first.aclose()


async def test_an_abort_ends_all_completions_and_no_stranger(make_config: MakeConfig) -> None:
    """The stranger is called like a completion would be."""
    async with Engine(make_config()) as engine:
        stranger = engine.generate("hello", LONG, "a#x")
        await anext(stranger)
        reader = asyncio.create_task(read(engine, FOUR, "a"))
        await wait_until(lambda: engine.stats().num_running == 5)
        await engine.abort("a")
        await reader
        assert engine.stats().finished["abort"] == 4
        await wait_until(lambda: engine.stats().num_running == 1)
        assert not (await anext(stranger)).finished
        await stranger.aclose()


@pytest.mark.parametrize("params", [SHORT, FOUR], ids=["one", "four"])
async def test_a_name_is_in_use_whatever_the_number_of_completions(
    params: SamplingParams, make_config: MakeConfig
) -> None:
    async with Engine(make_config()) as engine:
        running = engine.generate("hello", FOUR, "a")
        await anext(running)
        with pytest.raises(InvalidRequest, match="request_id 'a' is in use by a running request"):
            await read(engine, params, "a")
        await running.aclose()
        await wait_until(lambda: engine.stats().num_running + engine.stats().num_waiting == 0)
        assert await is_free(engine, "a")


async def test_a_name_may_be_used_again_as_soon_as_its_stop_string_was_read(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler learns of a stop string after the reader: for a moment there are two requests of one name."""
    tell = SchedulerActor.tell

    def tell_late(actor: SchedulerActor, message: Any) -> None:
        is_late = isinstance(message, AbortRequest)
        asyncio.get_running_loop().call_later(0.02 if is_late else 0.0, tell, actor, message)

    async with Engine(make_config()) as engine:
        probe = replace(SHORT, max_tokens=40)
        text = (await read(engine, probe, "probe")).outputs[0].text
        stop = text[20:24]
        params = replace(probe, max_tokens=300, stop=(stop,), output_kind="cumulative")
        bystander = asyncio.create_task(read(engine, LONG, "bystander"))
        await wait_until(lambda: engine.stats().num_running == 1)
        monkeypatch.setattr(SchedulerActor, "tell", tell_late)
        for _ in range(5):
            answer = (await read(engine, params, "a")).outputs[0]
            assert (answer.text, answer.finish_reason) == (text[: text.index(stop)], "stop")
        assert (await bystander).outputs[0].finish_reason == "length"


WORD = GrammarSpec.regex("[a-z]{400}")


def make_params(max_tokens: int = 40, n: int = 1, grammar: GrammarSpec | None = None) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, n=n, temperature=0, ignore_eos=grammar is None, grammar=grammar)


async def end(engine: Engine, params: SamplingParams, name: str | None = None, priority: int = 0) -> str | None:
    outputs = [output async for output in engine.generate("hello", params, name, priority=priority)]
    return outputs[-1].outputs[0].finish_reason


async def test_an_abort_before_the_core_has_the_request_ends_it(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_spec, gate = GrammarCompiler.compile, threading.Event()

    def compile_slowly(compiler: GrammarCompiler, spec: GrammarSpec) -> CompiledGrammar:
        gate.wait(60)
        return compile_spec(compiler, spec)

    monkeypatch.setattr(GrammarCompiler, "compile", compile_slowly)
    async with Engine(make_config()) as engine:
        task = asyncio.create_task(end(engine, make_params(300, grammar=WORD), "mine"))
        await wait_until(lambda: engine.stats().num_waiting_for_grammar == 1)
        await engine.abort("mine")
        gate.set()
        assert await task == "abort"
        assert await end(engine, make_params(4), "mine") == "length"


@pytest.mark.parametrize(
    ("owner", "name", "result"),
    [(InputProcessor, "encode", ("hello", [1, 2, 3])), (AdapterCatalog, "resolve", None)],
)
async def test_an_abort_is_honoured_while_the_prompt_is_prepared(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, result: Any
) -> None:
    begun, gate = asyncio.Event(), asyncio.Event()

    async def prepare(*_: Any) -> Any:
        begun.set()
        await gate.wait()
        return result

    monkeypatch.setattr(owner, name, prepare)
    async with Engine(make_config()) as engine:
        adapter = LoRARequest("any") if name == "resolve" else None
        stream = engine.generate("hello", make_params(300), "mine", lora_request=adapter)
        first = asyncio.ensure_future(anext(stream))
        await begun.wait()
        await engine.abort("mine")
        gate.set()
        completion = (await first).outputs[0]
        assert (completion.finish_reason, completion.token_ids) == ("abort", [])
        await stream.aclose()


async def test_a_message_that_exceeds_a_frame_fails_its_request_and_leaves_nothing_behind(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = CoreHost.handle

    def send_framed(host: CoreHost, message: Any) -> None:
        if isinstance(message, AddRequest):
            frames.pack_frame(message)
        handle(host, message)

    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 2000)
    monkeypatch.setattr(CoreHost, "handle", send_framed)
    async with Engine(make_config(max_num_seqs=4, max_num_waiting=4)) as engine:
        for _ in range(5):
            with pytest.raises(InvalidRequest, match="at most 2000 are allowed"):
                await anext(engine.generate([300] * 900, make_params(4, n=4)))
        assert not engine._client.num_unfinished and not engine.stats().num_waiting
        assert await end(engine, make_params(4)) == "length"
        assert await engine.sleep()


async def test_all_completions_that_wait_for_a_grammar_count(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    monkeypatch.setattr(GrammarCompiler, "compile", lambda compiler, spec: gate.wait(60))
    async with Engine(make_config(max_num_seqs=2, max_num_waiting=4)) as engine:
        asyncio.create_task(end(engine, make_params(n=5, grammar=WORD))).add_done_callback(
            lambda task: task.exception()
        )
        await wait_until(lambda: engine.stats().num_waiting_for_grammar == 5)
        with pytest.raises(EngineOverloaded):
            engine.check_capacity(2)
        engine.check_capacity(1)
        gate.set()


async def test_free_seats_are_room_beside_the_queue(make_config: MakeConfig) -> None:
    async with Engine(make_config(max_num_seqs=8, max_num_waiting=1)) as engine:
        reasons = await asyncio.gather(*(end(engine, make_params(4)) for _ in range(9)))
        assert reasons == ["length"] * 9
        assert await end(engine, make_params(4, n=9)) == "length"
        told = "n=10 must be at most 9: the engine runs max_num_seqs=8 at a time"
        with pytest.raises(InvalidRequest, match=told) as caught:
            await end(engine, make_params(4, n=10))
        assert (caught.value.param, engine.stats().num_rejected) == ("n", 0)


async def test_a_request_whose_matcher_fails_leaves_nothing_behind(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_matcher, calls = CompiledGrammar.matcher, []

    def fail_at_the_second(compiled: CompiledGrammar) -> Matcher:
        calls.append(compiled)
        if len(calls) == 2:
            raise MemoryError
        return make_matcher(compiled)

    monkeypatch.setattr(CompiledGrammar, "matcher", fail_at_the_second)
    async with Engine(make_config()) as engine:
        with pytest.raises(EngineError, match="could not be compiled: MemoryError"):
            await end(engine, make_params(n=3, grammar=WORD))
        assert (engine.stats().num_waiting, engine.stats().num_running) == (0, 0)
        async with asyncio.timeout(5):
            await engine.sleep()


async def test_a_request_during_a_crash_gets_an_error(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute, gate = ModelRunner.execute, threading.Event()

    def execute_slowly(*arguments: object) -> object:
        gate.wait(60)
        return execute(*arguments)  # type: ignore[arg-type]

    async with Engine(make_config()) as engine:
        monkeypatch.setattr(ModelRunner, "execute", execute_slowly)
        first = asyncio.create_task(end(engine, make_params()))
        await wait_until(lambda: engine.stats().num_running == 1)
        core = engine.replicas[0].connector.host.core  # type: ignore[attr-defined]
        core.scheduler.tell("no message")
        await wait_until(lambda: engine.state == "restarting")
        with pytest.raises(EngineDead, match="the engine is restarting"):
            await end(engine, make_params(grammar=WORD))
        gate.set()
        assert await first == "length"
        assert await end(engine, make_params(4)) == "length"


def test_the_first_chats_of_all_threads_get_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    make_copies = SpecialTokenEscaper._make_copies

    def make_slowly(escaper: SpecialTokenEscaper) -> object:
        copies = make_copies(escaper)
        time.sleep(0.1)
        return copies

    monkeypatch.setattr(SpecialTokenEscaper, "_make_copies", make_slowly)
    tokenizer = Tokenizer(DEMO_MODEL)
    special = max(tokenizer.special_tokens(tokenizer.vocab_size), key=len)
    messages = [{"role": "user", "content": f"what does {special} mean?"}]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(tokenizer.encode_chat, [messages] * 6))
    assert found == [tokenizer.encode_chat(messages)] * 6


async def test_a_refused_grammar_leaves_nothing_behind_in_the_counters(make_config: MakeConfig) -> None:
    async with Engine(make_config()) as engine:
        with pytest.raises(GrammarError):
            await end(engine, make_params(grammar=GrammarSpec.json_schema({"$dynamicRef": "#a"})))
        stats = engine.stats()
        assert (stats.prompt_tokens, stats.num_unfinished, sum(stats.finished.values())) == (0, 0, 0)


async def test_each_completion_is_ended_once_when_all_are_aborted(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of them run, and the grammars of two others are being compiled."""
    gate = threading.Event()
    monkeypatch.setattr(GrammarCompiler, "compile", lambda compiler, spec: gate.wait(60))
    async with Engine(make_config()) as engine:
        params = [make_params(300), make_params(n=2, grammar=WORD), make_params(n=2, grammar=WORD)]
        tasks = [asyncio.create_task(end(engine, each)) for each in params]
        await wait_until(lambda: engine.stats().num_running == 1 and engine.stats().num_waiting_for_grammar == 4)
        engine._client.abort_all()
        assert await asyncio.gather(*tasks) == ["abort"] * 3
        assert engine.stats().finished["abort"] == 5 and engine.stats().num_unfinished <= 1
        gate.set()


async def test_a_snapshot_that_a_crash_overtakes_is_none(make_config: MakeConfig) -> None:
    async with Engine(make_config()) as engine:
        client = engine._client
        engine.replicas[0].send = lambda message: client.fail_all(EngineDead("it crashed"))  # type: ignore[method-assign]
        assert await engine.snapshot() is None
