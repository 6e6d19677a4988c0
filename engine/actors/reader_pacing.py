"""ReaderPacing: readers get at most half of the event loop's time, so that a crowd of them never holds up the engine.

Waking hundreds of readers keeps the loop busy for milliseconds: each builds an event and writes to a socket. When
steps come faster than that, the next round of wake-ups waits as long as the last one took, and deltas merge.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Protocol


class Wakeable(Protocol):
    """A stream with a reader; without news `wake` does nothing."""

    def wake(self) -> None: ...


class ReaderPacing:
    """Wakes readers in rounds; lives on the event loop."""

    def __init__(self) -> None:
        self._owed: list[Sequence[Wakeable]] = []  # have news, and have not been woken
        self._start = 0.0  # of the round that is going on
        self._is_busy = False  # a round is going on, or its rest

    def wake(self, readers: Sequence[Wakeable]) -> None:
        """Wake these readers with the next round, which may be now."""
        if not self._owed or self._owed[-1] is not readers:
            self._owed.append(readers)
        if not self._is_busy:
            self._begin_round()

    def _begin_round(self) -> None:
        self._is_busy = bool(self._owed)
        if not self._owed:
            return
        owed, self._owed = self._owed, []
        self._start = time.monotonic()
        for readers in owed:
            for reader in readers:
                reader.wake()
        # The loop calls back in order: this comes when all of them have run.
        asyncio.get_running_loop().call_soon(self._end_round)

    def _end_round(self) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(time.monotonic() - self._start, self._begin_round)
