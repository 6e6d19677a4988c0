"""The first and the last moments of requests: at the door, while others crash, side by side for the first time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from engine import Engine, EngineConfig, EngineDead, EngineOverloaded, InvalidRequest, SamplingParams
from engine.config import DEMO_MODEL
from engine.shield import Shield
from engine.tokenizer import Tokenizer
from engine.worker.model_runner import ModelRunner
from grammar import CompiledGrammar, GrammarCompiler, GrammarSpec, Matcher
from tests.waiting import wait_until

MakeConfig = Callable[..., EngineConfig]
WORD = GrammarSpec.regex("[a-z]{400}")


def make_params(max_tokens: int = 40, n: int = 1, grammar: GrammarSpec | None = None) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens, n=n, temperature=0, ignore_eos=grammar is None, grammar=grammar
    )


async def end(
    engine: Engine, params: SamplingParams, name: str | None = None, priority: int = 0
) -> str | None:
    outputs = [output async for output in engine.generate("hello", params, name, priority=priority)]
    return outputs[-1].outputs[0].finish_reason


async def test_an_urgent_request_takes_the_only_seat_and_everybody_ends(make_config: MakeConfig) -> None:
    config = make_config(max_num_seqs=1, scheduling_policy="priority")
    async with Engine(config) as engine:
        for _ in range(4):
            slow = asyncio.create_task(end(engine, make_params(60), priority=5))
            await wait_until(lambda: engine.stats().num_running == 1)
            async with asyncio.timeout(20):
                assert await end(engine, make_params(4), priority=0) == "length"
                assert await slow == "length"


async def test_an_abort_at_the_door_ends_the_request(
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
            engine.check_room(2)
        engine.check_room(1)
        gate.set()


async def test_free_seats_are_room_beside_the_queue(make_config: MakeConfig) -> None:
    async with Engine(make_config(max_num_seqs=8, max_num_waiting=1)) as engine:
        reasons = await asyncio.gather(*(end(engine, make_params(4)) for _ in range(9)))
        assert reasons == ["length"] * 9
        assert await end(engine, make_params(4, n=9)) == "length"
        with pytest.raises(InvalidRequest, match="n=10 must be at most 9: the engine runs max_num_seqs=8"):
            await end(engine, make_params(4, n=10))


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
        with pytest.raises(MemoryError):
            await end(engine, make_params(n=3, grammar=WORD))
        assert (engine.stats().num_waiting, engine.stats().num_running) == (0, 0)
        async with asyncio.timeout(5):
            await engine.sleep()


async def test_who_comes_while_a_crashed_actor_waits_for_the_step_is_told_so(
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
        company = engine._supervisor.company
        assert company is not None
        company.detokenizer.tell("no message")  # type: ignore[arg-type]
        await wait_until(lambda: engine.state == "restarting")
        with pytest.raises(EngineDead, match="the engine is restarting"):
            await end(engine, make_params(grammar=WORD))
        with pytest.raises(EngineDead, match="the engine crashed"):
            await first
        gate.set()
        await wait_until(lambda: engine.state == "ready")
        assert await end(engine, make_params(4)) == "length"


async def test_a_cold_prompt_has_no_cached_tokens_whatever_its_siblings_find(make_config: MakeConfig) -> None:
    async with Engine(make_config()) as engine:
        outputs = [output async for output in engine.generate("a long one " * 20, make_params(4, n=3))]
        assert outputs[-1].num_cached_tokens == 0


def test_the_first_chats_of_all_threads_get_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    make_copies = Shield._make_copies

    def make_slowly(shield: Shield) -> object:
        copies = make_copies(shield)
        time.sleep(0.1)
        return copies

    monkeypatch.setattr(Shield, "_make_copies", make_slowly)
    tokenizer = Tokenizer(DEMO_MODEL)
    special = max(tokenizer.special_tokens(tokenizer.vocab_size), key=len)
    messages = [{"role": "user", "content": f"what does {special} mean?"}]
    found: list[list[int]] = []
    threads = [
        threading.Thread(target=lambda: found.append(tokenizer.encode_chat(messages))) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [tokenizer.encode_chat(messages)] * 6
