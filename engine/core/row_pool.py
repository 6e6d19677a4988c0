"""RowPool: who sits in which row of the batch, and what the worker must still be told about it."""

from __future__ import annotations


class RowPool:
    """Rows [0, num_rows). A row may have to wait for a step to be over before it is given to the next request."""

    def __init__(self, num_rows: int) -> None:
        self._free = list(range(num_rows - 1, -1, -1))
        self._draining: list[tuple[int, int]] = []  # (step that must be over first, row)
        self._removed: list[int] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_draining(self) -> int:
        """Rows that will be free when the steps in flight are over."""
        return len(self._draining)

    def take(self) -> int:
        return self._free.pop()

    def release(self, row: int, after_step: int | None = None) -> None:
        """Give a row back: at once, or when the step `after_step` has been answered."""
        if after_step is None:
            self._free.append(row)
            self._removed.append(row)
        else:
            self._draining.append((after_step, row))

    def drain(self, oldest_step: int) -> None:
        """Free the rows that waited for steps before `oldest_step`."""
        ready = [pair for pair in self._draining if pair[0] < oldest_step]
        for pair in ready:
            self._draining.remove(pair)
            self.release(pair[1])

    def collect_removed(self) -> list[int]:
        """Rows that were freed since the last call, for the next plan."""
        removed, self._removed = self._removed, []
        return removed
