"""HiddenStore: the target's hidden states of the latest steps."""

from __future__ import annotations

from collections import deque

import numpy as np
from torch import Tensor

MAX_TOKENS = 4096  # hidden states that are kept; the latest step is always kept


class HiddenStore:
    """Keeps hidden states as the steps computed them, so that a step costs one append."""

    def __init__(self) -> None:
        # (rows, starts and counts of their runs, hidden states [T, D]), oldest first.
        self._steps: deque[tuple[np.ndarray, np.ndarray, np.ndarray, Tensor]] = deque()
        self._num_tokens = 0
        self._num_appended = 0
        self._first_steps: dict[int, int] = {}  # row -> number of the first step that belongs to its request

    def clear(self, row: int) -> None:
        self._first_steps[row] = self._num_appended

    def append(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, hidden: Tensor) -> None:
        """Add a step. Its hidden states replace those of rejected drafts at the same positions."""
        self._steps.append((rows, starts, counts, hidden))
        self._num_appended += 1
        self._num_tokens += len(hidden)
        while self._num_tokens > MAX_TOKENS and len(self._steps) > 1:
            self._num_tokens -= len(self._steps.popleft()[3])

    def read(self, row: int, start: int, end: int) -> tuple[int, list[Tensor]]:
        """Return the hidden states of the positions before `end`, back to `start` as far as they are stored.

        Returns the first position, and the hidden states of consecutive positions in parts.
        """
        parts: list[Tensor] = []
        num_steps = min(len(self._steps), self._num_appended - self._first_steps.get(row, 0))
        for index in range(1, num_steps + 1):
            rows, starts, counts, hidden = self._steps[-index]
            found = np.flatnonzero(rows == row)
            if not len(found):
                continue
            first = int(starts[found[0]])
            last = first + int(counts[found[0]])
            if first >= end:
                continue
            if last < end:
                break
            begin = max(first, start)
            offset = int(counts[: found[0]].sum()) - first
            parts.append(hidden[offset + begin : offset + end])
            end = begin
            if end == start:
                break
        return end, parts[::-1]
