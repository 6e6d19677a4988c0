"""The watchdog: detects a step that does not come back."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable

from engine.messages import CoreStats

logger = logging.getLogger("troupe.engine")

MAX_PERIOD_S = 5.0
CHECKS_PER_TIMEOUT = 20


async def watch_steps(
    read_stats: Callable[[], CoreStats], timeout_s: float, report: Callable[[TimeoutError], None]
) -> None:
    """Look at the open steps from time to time, until cancelled.

    Args:
        timeout_s: how long steps may be open without any of them coming back or a new one leaving.
        report: told of the hang before it is raised, since a core ends only when its threads have.

    Raises:
        TimeoutError: the steps hang.
    """
    period = min(MAX_PERIOD_S, timeout_s / CHECKS_PER_TIMEOUT)
    seen, since = (0, 0), time.monotonic()
    while True:
        await asyncio.sleep(period)
        now, stats = time.monotonic(), read_stats()
        progress = (stats.num_steps, stats.num_open_steps)
        if progress != seen or not stats.num_open_steps:
            seen, since = progress, now
        elif now - since >= timeout_s:
            error = TimeoutError(f"a step has not come back for {timeout_s:g} s")
            logger.error("%s; what every thread is doing:\n%s", error, describe_threads())
            report(error)
            raise error


def describe_threads() -> str:
    """The stacks of all threads, by name."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    parts = [
        f"thread {names.get(identity, identity)}:\n{''.join(traceback.format_stack(frame))}"
        for identity, frame in frames.items()
    ]
    return "\n".join(parts)
