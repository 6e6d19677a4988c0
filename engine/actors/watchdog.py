"""Watchdog: detects a hung step, which would otherwise leave requests waiting forever."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import traceback
from collections.abc import Callable

from engine.core.scheduler import Scheduler

logger = logging.getLogger("troupe.engine")

MAX_PERIOD_S = 5.0
CHECKS_PER_TIMEOUT = 20


async def watch_steps(scheduler: Scheduler, timeout_s: float, report: Callable[[TimeoutError], None]) -> None:
    """Check the open steps periodically, until cancelled. A pause of the machine counts as one period.

    Args:
        timeout_s: longest time without progress while steps are open; a step that starts or ends is progress.
        report: called before the error is raised, because the core ends only after its threads.

    Raises:
        TimeoutError: a step hangs.
    """
    period = min(MAX_PERIOD_S, timeout_s / CHECKS_PER_TIMEOUT)
    seen, waited_s = (0, 0), 0.0
    while True:
        await asyncio.sleep(period)
        progress = (scheduler.state.num_steps, scheduler.num_open_steps)
        if progress != seen or not scheduler.num_open_steps:
            seen, waited_s = progress, 0.0
            continue
        waited_s += period
        if waited_s >= timeout_s:
            error = TimeoutError(f"a step has not come back for {timeout_s:g} s")
            logger.error("%s; stacks of all threads:\n%s", error, describe_threads())
            report(error)
            raise error


def describe_threads() -> str:
    """Return the stacks of all threads, by thread name."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    parts = [
        f"thread {names.get(identity, identity)}:\n{''.join(traceback.format_stack(frame))}"
        for identity, frame in frames.items()
    ]
    return "\n".join(parts)
