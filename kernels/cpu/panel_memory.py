"""PanelMemory: tensors side by side in large pieces of memory, which the system maps in pages of 2 MiB."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
import time
import weakref

import torch
from torch import Tensor

_PIECE_BYTES = 64 * 2**20
_PAGE_BYTES = 2 * 2**20
_AT_ONCE_BYTES = 2 * _PIECE_BYTES  # small models need no thread for their pages
_LINE_BYTES = 64  # of the processor's cache
_COLLAPSE = 25  # MADV_COLLAPSE of Linux 6.1
_NICENESS = 10


class PanelMemory:
    """Hands out memory that lives as long as the tensors over it. Any thread may call it.

    A matrix of a small model is shorter than a large page, so on its own it would get small ones, and reading
    through the weights would miss the TLB at every 4 KiB.

    Args:
        delay_s: after which small pages are joined to large ones; 0: they are large from the start, as the first
            _AT_ONCE_BYTES always are. On virtual machines new large pages may be slow: 3 s for the weights of a model
            of 1.5B, which take 0.7 s in small pages.
    """

    def __init__(self, delay_s: float = 0) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)
        self._lock = threading.Lock()
        self._delay_s = delay_s
        self._num_mapped = 0
        self._small: list[weakref.ref[mmap.mmap]] = []
        self._is_waiting = False  # a thread joins the small pages later

    def take(self, num_bytes: int) -> Tensor:
        """Return fresh memory, [num_bytes] uint8, aligned to a cache line."""
        num_taken = -(-num_bytes // _LINE_BYTES) * _LINE_BYTES
        with self._lock:
            if num_taken > len(self._rest):
                self._rest = self._map(max(num_taken, _PIECE_BYTES))
            taken, self._rest = self._rest[:num_bytes], self._rest[num_taken:]
        return taken

    def _map(self, num_bytes: int) -> Tensor:
        self._num_mapped += num_bytes
        if not self._delay_s or self._num_mapped <= _AT_ONCE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
            return map_large_pages(num_bytes)
        memory = _map_pages(num_bytes)
        self._small.append(weakref.ref(memory))
        if not self._is_waiting:
            self._is_waiting = True
            threading.Thread(target=self._join_pages, name="large-pages", daemon=True).start()
        return _align(memory, num_bytes)

    def _join_pages(self) -> None:
        """Join the pages of all maps, when none has been added for a while."""
        number = -1
        while number != len(self._small):
            number = len(self._small)
            time.sleep(self._delay_s)
        with self._lock:
            small, self._small, self._is_waiting = self._small, [], False
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        advise = ctypes.CDLL(None).madvise  # without the GIL, unlike that of mmap
        for each in small:
            if (memory := each()) is not None:
                piece = _align(memory, len(memory) - _PAGE_BYTES)
                for part in piece.split(8 * _PAGE_BYTES):
                    for advice in (mmap.MADV_HUGEPAGE, _COLLAPSE):  # an older system does the second in its own time
                        advise(ctypes.c_void_p(part.data_ptr()), ctypes.c_size_t(len(part)), advice)
                del memory, piece, part


def map_large_pages(num_bytes: int) -> Tensor:
    """[num_bytes] uint8 that start with a large page; the system gives pages as they are written.

    Raises:
        OSError, OverflowError: the system does not give so much.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(num_bytes, dtype=torch.uint8)
    memory = _map_pages(num_bytes)
    with contextlib.suppress(OSError):  # a system built without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return _align(memory, num_bytes)


def _map_pages(num_bytes: int) -> mmap.mmap:
    # Private, because most systems give no large pages to shared memory.
    return mmap.mmap(-1, num_bytes + _PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _align(memory: mmap.mmap, num_bytes: int) -> Tensor:
    """Return the bytes from the first place where a large page can begin."""
    piece = torch.frombuffer(memory, dtype=torch.uint8)
    start = -piece.data_ptr() % _PAGE_BYTES
    return piece[start : start + num_bytes]
