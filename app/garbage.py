"""Garbage: runs full collections, which stop all threads for 0.1 s, while no request is running."""

from __future__ import annotations

import asyncio
import gc

from engine import Engine

LOOK_S = 1.0
# Collections of the middle generation before a full one. Python's default, 10, would be reached during answers.
DUE, OVERDUE = 10, 100


async def collect_when_idle(engine: Engine) -> None:
    """Collect when due and no request is running. Under constant load Python collects a tenth as often as usual."""
    gc.set_threshold(*gc.get_threshold()[:2], OVERDUE)
    while True:
        await asyncio.sleep(LOOK_S)
        if gc.get_count()[2] >= DUE and not engine.stats().num_unfinished:
            gc.collect()
