"""SlotPool: indices that are lent to requests, such as the rows of the batch."""

from __future__ import annotations


class SlotPool:
    """Slots 0 to size - 1. A released slot may have to wait for a step to end before it is free."""

    def __init__(self, size: int) -> None:
        self.size = 0
        self._free: list[int] = []
        self._draining: list[tuple[int, int]] = []  # (step that must end first, slot)
        self.extend(size)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_draining(self) -> int:
        """Slots that become free when the steps in flight have ended."""
        return len(self._draining)

    def extend(self, size: int) -> None:
        """Grow the pool to `size` slots."""
        self._free += range(size - 1, self.size - 1, -1)
        self.size = size

    def take(self) -> int:
        return self._free.pop()

    def release(self, slot: int, after_step: int | None = None) -> None:
        """Free a slot, at once or when the step `after_step` has ended."""
        if after_step is None:
            self._free.append(slot)
        else:
            self._draining.append((after_step, slot))

    def drain(self, oldest_step: int) -> list[int]:
        """Free and return the slots that waited for steps before `oldest_step`."""
        ready = [slot for after_step, slot in self._draining if after_step < oldest_step]
        if ready:
            self._draining = [pair for pair in self._draining if pair[0] >= oldest_step]
            self._free += ready
        return ready
