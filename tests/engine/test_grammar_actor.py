"""Compiles of grammars: slow ones delay no other request, and the time limit counts only the compile itself."""

import asyncio
import hashlib
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from engine import Engine, EngineConfig, EngineDead, InvalidRequest, RequestTimeout, SamplingParams
from engine.actors.grammar_actor import LONG_SPEC
from engine.core import grammar_manager
from grammar import CompiledGrammar, GrammarCompiler, GrammarSpec, Matcher
from tests.waiting import wait_until

MakeConfig = Callable[..., EngineConfig]
GOOD = SamplingParams(max_tokens=4, grammar=GrammarSpec.regex("[ab]+"))


class Held:
    """Compiles wait for `release` where their spec's text holds "held"."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.release = threading.Event()
        self.texts: list[str] = []
        compile_now = GrammarCompiler.compile

        def compile_held(compiler: GrammarCompiler, spec: GrammarSpec) -> CompiledGrammar:
            self.texts.append(spec.text)
            if "held" in spec.text:
                self.release.wait(30)
            return compile_now(compiler, spec)

        monkeypatch.setattr(GrammarCompiler, "compile", compile_held)


def make_held(number: int, is_long: bool = False) -> SamplingParams:
    text = f"held{number}" + "x" * (LONG_SPEC if is_long else 0)
    return SamplingParams(max_tokens=4, grammar=GrammarSpec.regex(text))


async def answer(engine: Engine, params: SamplingParams, **options: float) -> str:
    last = [output async for output in engine.generate("hi", params, **options)][-1]
    return str(last.outputs[0].finish_reason)


@pytest.mark.parametrize("is_large", [True, False])
async def test_the_compiler_of_a_large_vocabulary_is_built_without_a_grammar(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, is_large: bool
) -> None:
    """It holds the GIL for half a second, which would stop the streams of others at the first grammar."""
    built: list[float] = []
    build = GrammarCompiler.__init__

    def build_slowly(compiler: GrammarCompiler, *args: Any, **options: Any) -> None:
        time.sleep(0.2)
        build(compiler, *args, **options)
        built.append(time.monotonic())

    monkeypatch.setattr(GrammarCompiler, "__init__", build_slowly)
    monkeypatch.setattr("engine.actors.grammar_actor.LARGE_VOCABULARY", 2 if is_large else 10**9)
    monkeypatch.setattr("engine.actors.grammar_actor.BUILD_DELAY_S", 0.01)
    async with Engine(make_config()) as engine:
        if is_large:
            await wait_until(lambda: bool(built))
        else:
            assert not await asyncio.sleep(0.3, built)
        await asyncio.gather(answer(engine, GOOD), answer(engine, make_held(1)))
        assert engine.stats().num_grammars_cached == 2
    assert len(built) == 1


@pytest.mark.parametrize("is_compiled", [True, False])
async def test_neither_a_compiled_grammar_nor_one_beside_slow_ones_queues(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, is_compiled: bool
) -> None:
    """Long grammars are compiled in a thread of their own."""
    async with Engine(make_config()) as engine:
        if is_compiled:
            await answer(engine, GOOD)
        held = Held(monkeypatch)
        jobs = [
            asyncio.create_task(answer(engine, make_held(number, is_long=not is_compiled)))
            for number in range(4)
        ]
        await asyncio.sleep(0)
        assert await answer(engine, GOOD) in ("stop", "length")
        assert not any(job.done() for job in jobs)
        held.release.set()
        await asyncio.gather(*jobs)


async def test_waiting_for_a_thread_is_not_held_against_a_grammar(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Engine(make_config(grammar_timeout_s=1.0)) as engine:
        await answer(engine, GOOD)
        held = Held(monkeypatch)
        slow = [asyncio.create_task(answer(engine, make_held(number))) for number in range(2)]
        waiting = SamplingParams(max_tokens=4, grammar=GrammarSpec.regex("[cd]+"))
        behind = asyncio.create_task(answer(engine, waiting))
        for job in slow:
            with pytest.raises(InvalidRequest, match="took longer than 1 s to compile"):
                await job
        await asyncio.sleep(0.2)
        held.release.set()
        assert await behind in ("stop", "length")


async def test_more_requests_for_a_grammar_that_is_compiled_take_no_thread(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, release = threading.Event(), threading.Event()
    compile_now = GrammarCompiler._compile_new

    def compile_held(compiler: GrammarCompiler, spec: GrammarSpec) -> CompiledGrammar:
        if "held" in spec.text:
            entered.set()
            release.wait(30)
        return compile_now(compiler, spec)

    async with Engine(make_config()) as engine:
        await answer(engine, GOOD)
        monkeypatch.setattr(GrammarCompiler, "_compile_new", compile_held)
        jobs = [asyncio.create_task(answer(engine, make_held(0)))]
        assert await asyncio.to_thread(entered.wait, 10)
        jobs += [asyncio.create_task(answer(engine, make_held(0))) for _ in range(3)]
        await wait_until(lambda: engine.stats().num_waiting_for_grammar == 4)
        other = SamplingParams(max_tokens=2, grammar=GrammarSpec.regex("[ef]+"))
        assert await answer(engine, other) in ("stop", "length")
        assert not any(job.done() for job in jobs)
        release.set()
        assert set(await asyncio.gather(*jobs)) <= {"stop", "length"}


async def test_a_grammar_of_an_aborted_request_is_not_compiled(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Engine(make_config()) as engine:
        await answer(engine, GOOD)
        held = Held(monkeypatch)
        jobs = [asyncio.create_task(answer(engine, make_held(number))) for number in range(3)]
        await wait_until(lambda: engine.stats().num_waiting_for_grammar == 3)
        jobs[2].cancel()
        await asyncio.wait([jobs[2]])
        held.release.set()
        await asyncio.gather(*jobs[:2])
        assert await answer(engine, SamplingParams(max_tokens=2, grammar=GrammarSpec.regex("[ef]+")))
        assert "held2" not in held.texts


async def test_a_deadline_counts_while_a_grammar_compiles(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Engine(make_config()) as engine:
        held = Held(monkeypatch)
        with pytest.raises(RequestTimeout, match=r"deadline of 0\.2 s"):
            await answer(engine, make_held(0), deadline_s=0.2)
        held.release.set()


async def test_a_grammar_that_waits_when_the_engine_closes_gets_an_error(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(make_config())
    await engine.start()
    held = Held(monkeypatch)
    jobs = [asyncio.create_task(answer(engine, make_held(number))) for number in range(4)]
    await wait_until(lambda: engine.stats().num_waiting_for_grammar == 4)
    closing = asyncio.create_task(engine.close())
    done, _ = await asyncio.wait(jobs[2:], timeout=60)
    held.release.set()
    await closing
    assert [type(error) for error in await asyncio.gather(*jobs, return_exceptions=True)] == [EngineDead] * 4
    assert len(done) == 2


async def test_min_tokens_holds_where_a_grammar_overrules_ignore_eos(make_config: MakeConfig) -> None:
    async with Engine(make_config()) as engine:
        eos = engine.eos_token_ids[0]
        params = SamplingParams(
            max_tokens=30, min_tokens=20, temperature=0, ignore_eos=True, logit_bias={eos: 100.0},
            grammar=GrammarSpec.regex("[ab]*"),
        )  # fmt: skip
        last = [output async for output in engine.generate("hi", params)][-1].outputs[0]
        assert last.finish_reason == "stop" and len(last.token_ids) == 21


@pytest.mark.parametrize("method", [None, {"method": "forced", "adaptive": False}])
async def test_a_stop_token_ends_a_text_only_where_the_grammar_may_end(
    make_config: MakeConfig, method: dict[str, Any] | None
) -> None:
    """The bias makes it the best token everywhere."""
    config = make_config() if method is None else make_config(speculative_config=method)
    async with Engine(config) as engine:
        token_id = engine.tokenizer.encode("a", add_special_tokens=False)[0]
        params = SamplingParams(
            max_tokens=60, min_tokens=12, temperature=0.7, seed=1, n=2, stop_token_ids=(token_id,),
            logit_bias={token_id: 100.0}, grammar=GrammarSpec.regex("[ab]{3}(, [ab]{9}){1,2}c*"),
        )  # fmt: skip
        last = [output async for output in engine.generate("hi", params)][-1]
    for each in last.outputs:
        assert (each.finish_reason, each.stop_reason, each.token_ids[-1]) == ("stop", token_id, token_id)
        assert re.fullmatch("[ab]{3}(, [ab]{9}){1,2}c*", each.text)
        assert token_id not in each.token_ids[:-1] and len(each.token_ids) > 12


async def test_one_slow_mask_delays_no_other_row_with_a_grammar(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others get sixty tokens while the slow one gets a few."""
    matchers: list[Matcher] = []
    fill = grammar_manager.fill_draft_bitmask

    def fill_slowly(filled: Sequence[Matcher], *more: Any) -> list[int]:
        matchers.extend(filled[: not matchers])
        if matchers[0] in filled:
            end = time.thread_time() + 0.05
            while time.thread_time() < end:
                hashlib.pbkdf2_hmac("sha256", b"", b"", 1000)  # without the interpreter lock
            matchers[0].usage.note_mask(0.05)
        return fill(filled, *more)

    monkeypatch.setattr(grammar_manager, "fill_draft_bitmask", fill_slowly)
    slow = SamplingParams(max_tokens=200, seed=1, grammar=GrammarSpec.regex("[a-f]{300}"), output_kind="delta")
    quick = SamplingParams(max_tokens=60, seed=2, grammar=GrammarSpec.regex("[a-g]{300}"))
    async with Engine(make_config()) as engine:
        num_slow = 0

        async def read_slowly() -> None:
            nonlocal num_slow
            async for output in engine.generate("slow", slow):
                num_slow += len(output.outputs[0].token_ids)

        reader = asyncio.create_task(read_slowly())
        await wait_until(lambda: num_slow > 0)
        answers = [[output async for output in engine.generate("quick", quick)][-1] for _ in range(2)]
        assert [len(answer.outputs[0].token_ids) for answer in answers] == [60, 60]
        assert num_slow < 20
        reader.cancel()
        await asyncio.wait([reader])
