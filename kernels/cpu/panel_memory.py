"""PanelMemory: tensors side by side in large pieces of memory, which the system maps in pages of 2 MiB."""

from __future__ import annotations

import contextlib
import mmap
from threading import Lock

import torch
from torch import Tensor

_PIECE_BYTES = 64 * 2**20
_PAGE_BYTES = 2 * 2**20
_LINE_BYTES = 64  # of the processor's cache


class PanelMemory:
    """Hands out memory that lives as long as the tensors over it. Any thread may call it.

    A matrix of a small model is shorter than a large page, so on its own it would get small ones, and reading
    through the weights would miss the TLB at every 4 KiB.
    """

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)
        self._lock = Lock()

    def take(self, num_bytes: int) -> Tensor:
        """Return fresh memory, [num_bytes] uint8, aligned to a cache line."""
        num_taken = -(-num_bytes // _LINE_BYTES) * _LINE_BYTES
        with self._lock:
            if num_taken > len(self._rest):
                self._rest = map_large_pages(max(num_taken, _PIECE_BYTES))
            taken, self._rest = self._rest[:num_bytes], self._rest[num_taken:]
        return taken


def map_large_pages(num_bytes: int) -> Tensor:
    """[num_bytes] uint8 that start with a large page; the system gives pages as they are written.

    Raises:
        OSError, OverflowError: the system does not give so much.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(num_bytes, dtype=torch.uint8)
    # Private, because most systems give no large pages to shared memory.
    memory = mmap.mmap(-1, num_bytes + _PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system built without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    piece = torch.frombuffer(memory, dtype=torch.uint8)
    start = -piece.data_ptr() % _PAGE_BYTES
    return piece[start : start + num_bytes]
