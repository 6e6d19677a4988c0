"""Garbage: a full collection stops everything for a tenth of a second, so it waits until nobody waits for a token."""

from __future__ import annotations

import asyncio
import gc

from engine import Engine

LOOK_S = 1.0
# In collections of the generation before it. Python's own 10 would be met in the middle of an answer.
DUE, OVERDUE = 10, 100


async def collect_when_idle(engine: Engine) -> None:
    """Collect when there is something to collect and no request; under endless load ten times as rarely as usual."""
    gc.set_threshold(*gc.get_threshold()[:2], OVERDUE)
    while True:
        await asyncio.sleep(LOOK_S)
        if gc.get_count()[2] >= DUE and not engine.stats().num_unfinished:
            gc.collect()
