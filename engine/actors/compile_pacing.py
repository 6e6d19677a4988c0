"""CompilePacing: pauses in the compile of a large grammar, so that steps go on meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

# A step acquires the interpreter lock about 40 times. Each time takes 75 us while another thread runs Python.
RUN_S = 0.001
PAUSE_S = 0.004
# A compile sleeps no longer in total, so that pauses alone never exceed its time limit.
MAX_PAUSES_S = 1.0


class CompilePacing:
    """Lets a thread that compiles run a fifth of the time while the executor has steps.

    Args:
        is_busy: whether the executor has steps; called from the threads that compile.
    """

    def __init__(self, is_busy: Callable[[], bool]) -> None:
        self._is_busy = is_busy
        # Each thread has its own `start` of the current run, and `left_s`, the seconds that it may still sleep.
        self._run = threading.local()

    def start(self) -> None:
        """Begin a compile in this thread."""
        self._run.start, self._run.left_s = time.perf_counter(), MAX_PAUSES_S

    def pause(self) -> None:
        """Sleep if this thread has run for long enough. Called often."""
        run = self._run
        if run.left_s > 0 and time.perf_counter() - run.start > RUN_S and self._is_busy():
            time.sleep(PAUSE_S)
            run.start, run.left_s = time.perf_counter(), run.left_s - PAUSE_S
