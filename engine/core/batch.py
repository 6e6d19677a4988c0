"""Batch: the requests of a step, as parallel lists and arrays. They are rebuilt only when the requests change."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable
from itertools import compress

import numpy as np

from engine.core.request import Request


class Batch:
    """Parallel lists and arrays over R requests. Immutable: steps with the same requests share one."""

    __slots__ = ("appends", "handles", "requests", "rows", "slots")

    def __init__(
        self,
        requests: list[Request],
        handles: list[int],
        appends: list[Callable[[int], None]],
        slots: np.ndarray,
        rows: np.ndarray,
    ) -> None:
        self.requests = requests
        self.handles = handles
        self.appends = appends  # token_ids.append of each
        self.slots = slots  # [R] int64
        self.rows = rows  # [R] int64

    @staticmethod
    def make_empty() -> Batch:
        nothing = np.zeros(0, dtype=np.int64)
        return Batch([], [], [], nothing, nothing)

    def __len__(self) -> int:
        return len(self.requests)

    def add(self, request: Request) -> Batch:
        """Return the batch with one more request, ordered by queue key."""
        at = bisect(self.requests, request.queue_key, key=lambda other: other.queue_key)
        return Batch(
            [*self.requests[:at], request, *self.requests[at:]],
            [*self.handles[:at], request.handle, *self.handles[at:]],
            [*self.appends[:at], request.token_ids.append, *self.appends[at:]],
            np.concatenate((self.slots[:at], (request.slot,), self.slots[at:])),
            np.concatenate((self.rows[:at], (request.row,), self.rows[at:])),
        )

    def select(self, is_kept: np.ndarray) -> Batch:
        """Return the requests that a boolean mask [R] selects."""
        kept = is_kept.tolist()
        return Batch(
            list(compress(self.requests, kept)),
            list(compress(self.handles, kept)),
            list(compress(self.appends, kept)),
            self.slots[is_kept],
            self.rows[is_kept],
        )
