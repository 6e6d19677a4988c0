"""The watchdog: a step that hangs fails its requests, is shown in the log, and is waited for."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from app.api import models
from app.api.context import ApiContext
from app.config import AppConfig
from engine import Engine, EngineConfig, EngineDead, RequestOutput, SamplingParams
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
        self._execute = MockWorker.execute

    def execute(self, worker: MockWorker, plan: Any) -> Any:
        if self.is_on.is_set():
            self.is_held.set()
            self.is_off.wait(20)
        return self._execute(worker, plan)


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hang]:
    found = Hang()
    monkeypatch.setattr(MockWorker, "execute", lambda worker, plan: found.execute(worker, plan))
    yield found
    found.is_on.clear()
    found.is_off.set()


async def complete(engine: Engine, params: SamplingParams = LONG) -> RequestOutput:
    async for output in engine.generate("Hello", params):
        last = output
    return last


async def hold_step(engine: Engine, hang: Hang) -> None:
    await wait_until(lambda: engine.stats().num_running == 1)
    hang.is_on.set()
    await wait_until(hang.is_held.is_set)


def crash(engine: Engine) -> None:
    company = engine._supervisor.company
    assert company is not None
    company.detokenizer.tell("no message")  # type: ignore[arg-type]


async def test_a_step_that_hangs_fails_its_requests_and_is_told(
    hang: Hang, caplog: pytest.LogCaptureFixture
) -> None:
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
        assert (engine.state, engine.error) == (
            "restarting",
            "TimeoutError: a step has not come back for 2 s",
        )
        answer = await models.check_health(ApiContext(engine, AppConfig()))
        assert answer.status_code == 503 and b"has not come back" in bytes(answer.body)
        with pytest.raises(EngineDead, match="has not come back"):
            await complete(engine)
        hang.is_on.clear()
        hang.is_off.set()
        await wait_until(lambda: engine.state == "ready")
        assert len((await complete(engine)).outputs[0].token_ids) == 400
        assert engine.stats().num_restarts == 1


async def test_an_engine_that_hangs_can_be_closed(hang: Hang) -> None:
    engine = Engine(CONFIG)
    await engine.start()
    supervisor = engine._supervisor._task
    assert supervisor is not None
    hang.is_on.set()
    with pytest.raises(EngineDead):
        await complete(engine)
    begun = time.monotonic()
    await engine.close()
    assert time.monotonic() - begun < 10
    assert engine.state == "closed"
    hang.is_off.set()
    await wait_until(supervisor.done)
    assert engine.state == "closed"


async def test_a_hang_after_a_crash_is_told_and_waited_for(
    hang: Hang, caplog: pytest.LogCaptureFixture
) -> None:
    async with Engine(CONFIG) as engine:
        work = asyncio.ensure_future(complete(engine))
        await hold_step(engine, hang)
        begun = time.monotonic()
        crash(engine)
        with pytest.raises(EngineDead, match="the engine crashed: Expected code"):
            await work
        assert time.monotonic() - begun < 1.5
        await wait_until(lambda: "has not come back" in (engine.error or ""))
        hung, crashed = caplog.messages
        assert "self.is_off.wait" in hung and crashed.startswith("the engine had crashed before: Expected")
        hang.is_on.clear()
        hang.is_off.set()
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
    async with asyncio.timeout(10):
        await engine.close()
    assert engine.state == "closed"
    with pytest.raises(EngineDead, match="crashed" if has_crashed else "hangs"):
        await work


async def test_slow_steps_and_idle_times_are_no_hang() -> None:
    async with Engine(EngineConfig(mock_step_ms=100.0, step_timeout_s=4.0)) as engine:
        output = await complete(engine, SamplingParams(max_tokens=60, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 60
        # idle for longer than the timeout: the scheduler has no open step then
        await asyncio.wait([asyncio.ensure_future(asyncio.sleep(5))])
        assert engine.state == "ready" and engine.error is None


async def test_without_a_timeout_nobody_watches() -> None:
    async with Engine(EngineConfig(mock_step_ms=1.0, step_timeout_s=0)):
        names = {task.get_name() for task in asyncio.all_tasks()}
        assert "scheduler" in names and "watchdog" not in names


async def test_without_a_timeout_a_close_has_a_patience_of_its_own(
    hang: Hang, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.supervisor.UNWATCHED_PATIENCE_S", 0.2, raising=False)
    engine = Engine(EngineConfig(mock_step_ms=1.0, step_timeout_s=0))
    await engine.start()
    gave_back: list[bool] = []
    monkeypatch.setattr(MockWorker, "close", lambda _, *, gives_back: gave_back.append(gives_back))
    work = asyncio.ensure_future(complete(engine))
    await hold_step(engine, hang)
    async with asyncio.timeout(8):
        await engine.close()
    assert (engine.state, gave_back) == ("closed", [False])
    with pytest.raises(EngineDead, match="closed"):
        await asyncio.wait_for(work, 1)
