"""Names of requests: whose they are, when they are free again, and who is ended by them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from engine import Engine, EngineConfig, InvalidRequest, RequestOutput, RequestTimeout, SamplingParams
from engine.actors.scheduler import SchedulerActor
from engine.messages import AbortRequest
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
        second = engine.generate("hello", LONG, "a")
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
        assert engine.stats().num_running == 1
        assert not (await anext(stranger)).finished
        await stranger.aclose()


async def test_an_abort_leaves_a_stranger_who_has_the_name_of_an_ended_completion(
    make_config: MakeConfig,
) -> None:
    """The first of two completions stops at a token that the second does not write for long."""
    async with Engine(make_config()) as engine:
        pair = SamplingParams(n=2, max_tokens=400, seed=3, ignore_eos=True, output_kind="delta")
        first, second = (await read(engine, replace(pair, output_kind="final"), "probe")).outputs
        stop = next(token for token in first.token_ids if token not in second.token_ids[:250])
        params = replace(pair, stop_token_ids=(stop,))
        family = asyncio.create_task(read(engine, params, "a"))
        await wait_until(lambda: engine.stats().finished["stop"] == 1)
        stranger = engine.generate("hello", LONG, "a#0")
        await anext(stranger)
        await engine.abort("a")
        await family
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


async def test_a_name_is_free_again_after_its_deadline(make_config: MakeConfig) -> None:
    async with Engine(make_config()) as engine:
        with pytest.raises(RequestTimeout, match=r"0\.05 s"):
            async for _ in engine.generate("hello", LONG, "a", deadline_s=0.05):
                pass
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
