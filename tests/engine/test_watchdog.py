"""The watchdog: a step that hangs fails its requests, is shown in the log, and is waited for."""

import asyncio
import logging
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from app.api import models
from app.api.context import ApiContext
from app.config import AppConfig
from engine import Engine, EngineConfig, EngineDead, RequestOutput, SamplingParams
from engine.actors import watchdog
from engine.cluster.connection import LocalConnection
from engine.worker.mock_worker import MockWorker
from tests.waiting import wait_until

LONG = SamplingParams(max_tokens=400, ignore_eos=True)
CONFIG = EngineConfig(mock_step_ms=1.0, step_timeout_s=2.0)


class Hang:
    """Holds every step of every mock worker while it is on."""

    def __init__(self) -> None:
        self.is_on = threading.Event()
        self.is_held = threading.Event()
        self.is_off = threading.Event()
        self.is_back = threading.Event()
        self._execute = MockWorker.execute

    def execute(self, worker: MockWorker, plan: Any) -> Any:
        if self.is_on.is_set():
            self.is_held.set()
            self.is_off.wait(60)
            self.is_back.set()
        return self._execute(worker, plan)

    def end(self) -> None:
        self.is_on.clear()
        self.is_off.set()


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hang]:
    found = Hang()
    monkeypatch.setattr(MockWorker, "execute", lambda worker, plan: found.execute(worker, plan))
    monkeypatch.setattr("engine.cluster.connection.HANG_TIMEOUT_S", 0.2)
    yield found
    found.end()


async def complete(engine: Engine, params: SamplingParams = LONG) -> RequestOutput:
    async for output in engine.generate("Hello", params):
        last = output
    return last


async def hold_step(engine: Engine, hang: Hang) -> None:
    await wait_until(lambda: engine.stats().num_running == 1)
    hang.is_on.set()
    await wait_until(hang.is_held.is_set)


def crash(engine: Engine) -> None:
    engine.replicas[0].connector.host.core.scheduler.tell("no message")  # type: ignore[attr-defined]


async def test_a_hung_step_fails_its_requests_and_is_reported(hang: Hang, caplog: pytest.LogCaptureFixture) -> None:
    async with Engine(CONFIG) as engine:
        works = [asyncio.ensure_future(complete(engine)) for _ in range(3)]
        await wait_until(lambda: engine.stats().num_running == 3)
        with caplog.at_level(logging.ERROR):
            hang.is_on.set()
            for work in works:
                with pytest.raises(EngineDead, match=r"a step has not come back for 2 s"):
                    await work
        assert len(caplog.records) == 1
        shown = caplog.records[0].getMessage()
        assert "thread troupe-executor" in shown and "self.is_off.wait" in shown
        told = "TimeoutError: a step has not come back for 2 s"
        assert (engine.state, engine.error) == ("restarting", told)
        answer = await models.check_health(ApiContext(engine, AppConfig()))
        assert answer.status_code == 503 and b"has not come back" in bytes(answer.body)
        with pytest.raises(EngineDead, match="has not come back"):
            await complete(engine)
        hang.end()
        await wait_until(lambda: engine.state == "ready")
        assert len((await complete(engine)).outputs[0].token_ids) == 400
        assert engine.stats().num_restarts == 1


async def test_an_engine_that_hangs_can_be_closed(hang: Hang) -> None:
    engine = Engine(CONFIG)
    await engine.start()
    connection = engine.replicas[0].connection
    assert isinstance(connection, LocalConnection)
    hang.is_on.set()
    with pytest.raises(EngineDead):
        await complete(engine)
    await engine.close()
    assert engine.state == "closed" and not hang.is_back.is_set()
    hang.is_off.set()
    await wait_until(lambda: not connection.is_running)
    assert engine.state == "closed"


async def test_a_hang_after_a_crash_is_reported_and_waited_for(hang: Hang, caplog: pytest.LogCaptureFixture) -> None:
    async with Engine(CONFIG) as engine:
        work = asyncio.ensure_future(complete(engine))
        await hold_step(engine, hang)
        crash(engine)
        with pytest.raises(EngineDead, match="the engine hangs: TimeoutError: a step has not come back"):
            await work
        await wait_until(lambda: "has not come back" in (engine.error or ""))
        crashed, _, hung = caplog.messages
        assert "self.is_off.wait" in hung and crashed.startswith("the core crashed: AssertionError: Expected")
        hang.end()
        await wait_until(lambda: engine.state == "ready")
        assert len((await complete(engine)).outputs[0].token_ids) == 400


@pytest.mark.parametrize("has_crashed", [False, True])
async def test_a_close_gives_a_step_no_longer_than_the_timeout(hang: Hang, has_crashed: bool) -> None:
    engine = Engine(CONFIG)
    await engine.start()
    work = asyncio.ensure_future(complete(engine))
    await hold_step(engine, hang)
    if has_crashed:
        crash(engine)
        await wait_until(lambda: engine.state == "restarting")
    await engine.close()
    assert engine.state == "closed" and not hang.is_back.is_set()
    with pytest.raises(EngineDead, match="hangs"):
        await work


async def test_slow_steps_and_idle_times_are_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        await asyncio.sleep(0)

    async def pass_time(seconds: float) -> None:
        end = now + seconds
        while now < end and not watch.done():
            await asyncio.sleep(0)

    monkeypatch.setattr(watchdog, "asyncio", SimpleNamespace(sleep=sleep))
    steps: Any = SimpleNamespace(state=SimpleNamespace(num_steps=0), num_open_steps=1)
    watch = asyncio.ensure_future(watchdog.watch_steps(steps, 4.0, lambda error: None))
    for _ in range(5):
        steps.state.num_steps += 1
        await pass_time(3.5)
    steps.num_open_steps = 0
    await pass_time(100)
    assert not watch.done()
    steps.num_open_steps = 1
    await pass_time(4.5)
    with pytest.raises(TimeoutError, match="has not come back for 4 s"):
        await watch


async def test_without_a_timeout_no_step_is_watched_and_a_close_has_its_own_limit(
    hang: Hang, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.cluster.connection.UNWATCHED_TIMEOUT_S", 0.2)
    engine = Engine(EngineConfig(mock_step_ms=1.0, step_timeout_s=0))
    await engine.start()
    names = {task.get_name() for task in asyncio.all_tasks()}
    assert "scheduler" in names and "watchdog" not in names
    freed: list[bool] = []
    monkeypatch.setattr(MockWorker, "close", lambda _, *, frees_memory: freed.append(frees_memory))
    work = asyncio.ensure_future(complete(engine))
    await hold_step(engine, hang)
    async with asyncio.timeout(8):
        await engine.close()
    assert (engine.state, freed) == ("closed", [False])
    with pytest.raises(EngineDead, match="closed"):
        await asyncio.wait_for(work, 1)
