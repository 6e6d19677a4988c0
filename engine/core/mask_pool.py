"""MaskPool: memory for the grammar masks of a step, reused once no reader is left."""

from __future__ import annotations

import sys

import numpy as np

from grammar import allocate_bitmask

MAX_NUM_BUFFERS = 4
# References to an unused buffer: the pool's list, the loop variable and the argument of getrefcount.
NUM_OWN_REFERENCES = 3


class MaskPool:
    """Hands out masks without allocating them in every step, which costs up to 1 ms for 256 rows. One owner.

    Ownership: the pool owns the buffers. A caller may read a mask while it holds the array, a slice of it or a
    tensor over its memory. Each of these references the buffer, and the pool reuses only unreferenced buffers.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._buffers: list[np.ndarray] = []

    def take(self, num_rows: int) -> np.ndarray:
        """Return masks, int32 [num_rows, ceil(V/32)], with arbitrary content."""
        for buffer in self._buffers:
            if len(buffer) >= num_rows and sys.getrefcount(buffer) == NUM_OWN_REFERENCES:
                return buffer[:num_rows]
        grown = allocate_bitmask(max(1, 1 << (num_rows - 1).bit_length()), self._vocab_size)
        self._buffers = [*self._buffers, grown][-MAX_NUM_BUFFERS:]
        return grown[:num_rows]
