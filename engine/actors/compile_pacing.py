"""CompilePacing: pauses in the compile of a large grammar, so that steps go on meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

# A step takes the interpreter lock some 40 times, about 75 us each while another thread runs Python.
RUN_S = 0.001
PAUSE_S = 0.004


class CompilePacing:
    """Lets a thread that compiles run a fifth of the time while the executor has steps.

    Args:
        is_busy: whether the executor has steps; called from the threads that compile.
    """

    def __init__(self, is_busy: Callable[[], bool]) -> None:
        self._is_busy = is_busy
        self._run = threading.local()  # `start` of the thread's current run

    def start(self) -> None:
        """Begin a compile in this thread, with a run of its own."""
        self._run.start = time.perf_counter()

    def pause(self) -> None:
        """Sleep if this thread has run for long enough. Called often."""
        if time.perf_counter() - self._run.start > RUN_S and self._is_busy():
            time.sleep(PAUSE_S)
            self.start()
