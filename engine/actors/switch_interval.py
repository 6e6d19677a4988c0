"""Shortens the interval after which a thread waiting for Python's interpreter lock may take it."""

from __future__ import annotations

import sys

# With Python's default of 5 ms, a busy event loop kept the executor thread waiting for seconds: the interval starts
# anew whenever the loop releases the lock for a moment. 20 us are shorter than one iteration of a busy loop.
SWITCH_INTERVAL_S = 0.00002


def shorten_switch_interval() -> None:
    """Reduce the switch interval of the process to SWITCH_INTERVAL_S, unless it is shorter already."""
    if sys.getswitchinterval() > SWITCH_INTERVAL_S:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
