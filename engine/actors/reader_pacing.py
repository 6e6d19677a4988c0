"""ReaderPacing: limits readers to half of the event loop's time, so that many of them do not delay the engine.

Waking hundreds of readers occupies the loop for milliseconds: each builds an event and writes to a socket. After a
round of wake-ups, the next round waits as long as the last one took; meanwhile deltas merge.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Protocol


class Wakeable(Protocol):
    """A stream with a reader; `wake` does nothing without new output."""

    def wake(self) -> None: ...


class ReaderPacing:
    """Wakes readers in rounds, on the event loop."""

    def __init__(self) -> None:
        self._pending: list[Sequence[Wakeable]] = []  # to be woken in the next round
        self._start = 0.0  # of the current round
        self._is_busy = False  # during a round and the wait after it

    def wake(self, readers: Sequence[Wakeable]) -> None:
        """Wake these readers in the next round, which starts now if none is in progress."""
        if not self._pending or self._pending[-1] is not readers:
            self._pending.append(readers)
        if not self._is_busy:
            self._begin_round()

    def _begin_round(self) -> None:
        self._is_busy = bool(self._pending)
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        self._start = time.monotonic()
        for readers in pending:
            for reader in readers:
                reader.wake()
        # The loop runs callbacks in order, so this one follows the readers.
        asyncio.get_running_loop().call_soon(self._end_round)

    def _end_round(self) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(time.monotonic() - self._start, self._begin_round)
