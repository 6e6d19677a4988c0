"""HiddenStore: the target's hidden states of each row that a drafter has not used yet."""

from __future__ import annotations

import torch
from torch import Tensor


class HiddenStore:
    """Consecutive hidden states per row, as slices of the steps that computed them.

    Args:
        max_num_tokens: of a row; the oldest are dropped.
    """

    def __init__(self, max_num_tokens: int) -> None:
        self._max_num_tokens = max_num_tokens
        self._parts: dict[int, list[tuple[int, Tensor]]] = {}  # row -> (position of the first, [n, D])

    def clear(self, row: int) -> None:
        """Forget a row's hidden states."""
        self._parts.pop(row, None)

    def append(self, row: int, start: int, hidden: Tensor) -> None:
        """Add the hidden states of the tokens from `start` on; they replace those of rejected drafts."""
        parts = self._parts.setdefault(row, [])
        while parts and parts[-1][0] >= start:
            parts.pop()
        if parts:
            first, last = parts[-1]
            if first + len(last) < start:  # the row began again elsewhere
                parts.clear()
            elif first + len(last) > start:
                parts[-1] = (first, last[: start - first])
        parts.append((start, hidden))
        while len(parts) > 1 and self.count(row) > self._max_num_tokens:
            del parts[0]

    def count(self, row: int) -> int:
        """Return the number of stored hidden states of a row."""
        return sum(len(hidden) for _, hidden in self._parts.get(row, ()))

    def find_start(self, row: int) -> int | None:
        """Return the position of the first stored hidden state; None if there is none."""
        parts = self._parts.get(row)
        return parts[0][0] if parts else None

    def read(self, row: int, start: int, end: int) -> Tensor | None:
        """Return the hidden states of positions [start, end), [end - start, D]; None if some are missing."""
        found, position = [], start
        for first, hidden in self._parts.get(row, ()):
            stop = min(end, first + len(hidden))
            if first <= position < stop:
                found.append(hidden[position - first : stop - first])
                position = stop
        if position < end:
            return None
        return found[0] if len(found) == 1 else torch.cat(found)

    def drop(self, row: int, end: int) -> None:
        """Forget the hidden states of positions before `end`."""
        kept = []
        for first, hidden in self._parts.get(row, ()):
            if first >= end:
                kept.append((first, hidden))
            elif first + len(hidden) > end:
                kept.append((end, hidden[end - first :]))
        self._parts[row] = kept
