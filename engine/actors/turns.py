"""How often the threads of the process take turns in Python."""

from __future__ import annotations

import sys

# Python's own 5 ms is the time after which a thread that waits for the interpreter asks for it, and it starts anew
# whenever the other thread lets go for a moment, as an event loop does at every turn. A loop that was never idle
# kept the executor out for seconds. 20 us are shorter than the turn of a loop that hands on tokens.
SWITCH_S = 0.00002


def take_turns_often() -> None:
    """Let the executor and the grammar thread have the interpreter soon after they ask, in the whole process."""
    if sys.getswitchinterval() > SWITCH_S:
        sys.setswitchinterval(SWITCH_S)
