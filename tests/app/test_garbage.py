"""Full collections: when nobody waits for a token, and soon enough when somebody always does."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from app import garbage
from engine.metrics import EngineStats


class Cycle:
    """Only a collection frees it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def thresholds(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(garbage, "LOOK_S", 0.001)
    before = gc.get_threshold()
    gc.freeze()  # what other tests left need not be looked at
    gc.enable()  # a server whose start failed in this process has left it off
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


async def watch(num_running: int) -> None:
    engine: Any = SimpleNamespace(stats=lambda: EngineStats(num_running=num_running))
    task = asyncio.create_task(garbage.collect_when_idle(engine))
    await asyncio.sleep(0.1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def make_old_garbage(num_collections: int) -> Any:
    """A reference to a cycle that has reached the oldest generation, after so many collections of the one before."""
    gc.collect()
    cycle = Cycle()
    reference = weakref.ref(cycle)
    gc.collect(1)
    del cycle
    for _ in range(num_collections):
        gc.collect(1)
    return reference


@pytest.mark.parametrize(
    ("num_running", "num_collections", "is_collected"),
    [(0, garbage.DUE + 1, True), (1, garbage.DUE + 1, False), (0, 2, False)],
    ids=["idle", "busy", "nothing to do"],
)
async def test_old_garbage_goes_when_the_engine_is_idle(
    num_running: int, num_collections: int, is_collected: bool
) -> None:
    reference = make_old_garbage(num_collections)
    assert reference() is not None
    await watch(num_running)
    assert (reference() is None) == is_collected


async def test_under_endless_load_python_collects_by_itself_later() -> None:
    await watch(1)
    assert gc.isenabled()
    assert gc.get_threshold()[2] == garbage.OVERDUE
