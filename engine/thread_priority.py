"""Lowers the priority of threads whose work may wait."""

from __future__ import annotations

import os
import sys
import threading

# At a niceness of 10 a thread gets a tenth of the CPU time of a step's thread that competes with it.
NICENESS = 10


def lower_priority(niceness: int = NICENESS) -> None:
    """Let other threads use the CPU before this one and those that it starts. Does nothing except on Linux."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        before = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, min(before + niceness, 19))
