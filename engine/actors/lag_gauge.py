"""Measures how late the event loop runs its callbacks."""

from __future__ import annotations

import asyncio
import time

from engine.metrics import Histogram

PERIOD_S = 0.1


async def watch_loop_lag(lag: Histogram) -> None:
    """Sleep repeatedly and record in `lag` by how many seconds each wake-up was late, until cancelled."""
    while True:
        due = time.monotonic() + PERIOD_S
        await asyncio.sleep(PERIOD_S)
        lag.observe(max(0.0, time.monotonic() - due))
