"""Replicas in processes: the same texts as one core in this process, whatever ends a replica."""

import asyncio
import random
import signal
import time
from collections.abc import Callable

import pytest

from engine import Engine, EngineConfig, SamplingParams
from engine.front.entry import Entry
from grammar import GrammarError, GrammarSpec
from tests.app.api.harness import needs_model
from tests.engine.cluster.fault_run import compare, find_pid, kill, make_bodies, make_demo_config, send_signal
from tests.engine.mixed_requests import ROOMY, Completion, MixedRequest, make_mixed_requests, run_mixed
from tests.waiting import wait_until

MakeConfig = Callable[..., EngineConfig]


def find_ready(engine: Engine) -> list[int]:
    return [replica.index for replica in engine.replicas if replica.state == "ready"]


@pytest.fixture
def requests() -> list[MixedRequest]:
    return make_mixed_requests()


async def test_texts_do_not_change_when_replicas_are_killed(
    make_config: MakeConfig, requests: list[MixedRequest], mixed_answers: list[list[Completion]]
) -> None:
    """The full size is run by hand, see `fault_run.py`."""
    chance = random.Random(1)
    async with Engine(make_config(**ROOMY, data_parallel_size=3, max_num_seqs=8)) as engine:
        answers = asyncio.ensure_future(run_mixed(engine, requests))
        num_kills = 0
        for num_tokens in range(100, 10000, 200):
            await wait_until(lambda n=num_tokens: answers.done() or engine.stats().generation_tokens > n)
            if not answers.done() and (ready := find_ready(engine)):
                send_signal(engine, chance.choice(ready), signal.SIGKILL)
                num_kills += 1
        assert await answers == mixed_answers
        stats = engine.stats()
    assert num_kills >= 3
    assert stats.num_resumed > num_kills
    assert stats.prefix_cache_queries > sum(len(request.prompt) for request in requests) / 2
    assert stats.num_resumed_inexact == 0
    assert sum(stats.finished.values()) == sum(request.params.n for request in requests)


@needs_model
async def test_streams_over_http_do_not_change_when_replicas_are_killed() -> None:
    """The full size is run by hand, see `fault_run.py`."""
    found = await compare(make_demo_config(2, "sigkill", "127.0.0.1"), make_bodies(9, 1), kill, 1, 0)
    assert (found["equal"], found["ended"]) == (9, (12, 12))
    assert found["faults"] and found["resumed"]


async def test_a_stopped_core_is_noticed_and_its_requests_go_on(make_config: MakeConfig) -> None:
    params = SamplingParams(max_tokens=300, seed=5, ignore_eos=True)
    async with Engine(make_config(data_parallel_size=2, mock_step_ms=10.0, heartbeat_timeout_s=2.0)) as engine:
        whole = [output async for output in engine.generate("hello", params)][-1]
        stream = engine.generate("hello", params)
        await anext(stream)
        (held,) = [each.index for each in engine.describe_replicas() if each.num_requests]
        send_signal(engine, held, signal.SIGSTOP)
        start = time.monotonic()
        await wait_until(lambda: engine.stats().num_resumed == 1, within_s=20)
        assert time.monotonic() - start < 8
        *_, last = [output async for output in stream]
    assert last.outputs[0].token_ids == whole.outputs[0].token_ids


async def test_a_request_that_crashes_two_cores_fails_alone(make_config: MakeConfig) -> None:
    """The core that holds it is ended by a segmentation fault, as by a kernel that it breaks."""
    params = SamplingParams(max_tokens=30, seed=5, ignore_eos=True)
    async with Engine(make_config(data_parallel_size=2, mock_step_ms=30.0)) as engine:

        async def complete(name: str) -> str | None:
            outputs = [output async for output in engine.generate("hello", params, name)]
            return outputs[-1].outputs[0].finish_reason

        async def crash_cores() -> None:
            for number in range(2):
                await wait_until(
                    lambda n=number: ((entry := find_poison()).group is not None) == n and entry.replica is not None
                )
                send_signal(engine, find_poison().ticket.replica, signal.SIGSEGV)  # type: ignore[union-attr]

        def find_poison() -> Entry:
            return engine._client._requests["poison"]

        answers = asyncio.gather(*(complete(name) for name in ("a", "b", "c", "poison", "d", "e")))
        await wait_until(lambda: engine._client.num_unfinished == 6)
        await crash_cores()
        assert await answers == ["length", "length", "length", "error", "length", "length"]


async def test_a_rolling_restart_ends_no_request(
    make_config: MakeConfig, requests: list[MixedRequest], mixed_answers: list[list[Completion]]
) -> None:
    async with Engine(make_config(**ROOMY, data_parallel_size=2)) as engine:
        answers = asyncio.ensure_future(run_mixed(engine, requests))
        await wait_until(lambda: engine.stats().generation_tokens > 100)
        pids = [find_pid(engine, index) for index in range(2)]
        for index in range(2):
            await engine.restart_replica(index)
        assert await answers == mixed_answers
        assert engine.stats().num_resumed > 0
        assert set(pids).isdisjoint(find_pid(engine, index) for index in range(2))


async def test_refused_requests_and_slow_readers_disturb_no_replica(
    make_config: MakeConfig, requests: list[MixedRequest], mixed_answers: list[list[Completion]]
) -> None:
    """A refused request counts against no replica and leaves nothing behind; a slow reader gets every token."""
    params = SamplingParams(max_tokens=60, seed=5, ignore_eos=True, output_kind="delta")
    bad = SamplingParams(grammar=GrammarSpec.regex("(unclosed"))

    async def refuse(engine: Engine) -> None:
        with pytest.raises(GrammarError, match="unclosed"):
            await anext(engine.generate("hello", bad))

    async with Engine(make_config(**ROOMY, data_parallel_size=2)) as engine:
        slow = [engine.generate("hello", params) for _ in range(8)]
        firsts = [(await anext(stream)).outputs[0].token_ids for stream in slow]
        storm = asyncio.gather(*(refuse(engine) for _ in range(60)))
        assert await run_mixed(engine, requests) == mixed_answers
        await storm
        await wait_until(lambda: engine.stats().num_unfinished == 0)
        rests = [[output async for output in stream] for stream in slow]
        texts = [[*first, *rest[0].outputs[0].token_ids] for first, rest in zip(firsts, rests, strict=True)]
        assert all(len(rest) == 1 for rest in rests) and len(texts[0]) == 60 and texts == [texts[0]] * 8
        states = [(each.state, each.num_requests, each.num_restarts) for each in engine.describe_replicas()]
        assert states == [("ready", 0, 0)] * 2 and not engine._client.num_unfinished
