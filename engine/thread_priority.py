"""Lets threads that compute steps go before others: niceness, and the switch interval of Python's lock."""

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


# With Python's default of 5 ms, a busy event loop kept the executor thread waiting for seconds: the interval starts
# anew whenever the loop releases the lock for a moment. 20 us are shorter than one iteration of a busy loop.
SWITCH_INTERVAL_S = 0.00002


def shorten_switch_interval() -> None:
    """Reduce the switch interval of the process to SWITCH_INTERVAL_S, unless it is shorter already."""
    if sys.getswitchinterval() > SWITCH_INTERVAL_S:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
