"""ResultMemory: memory of large results, which is used again as soon as no tensor lies in it."""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

_LARGE_BYTES = 2**20
_MAX_IDLE_BYTES = 64 * 2**20


class ResultMemory:
    """Hands out memory for the results of ops. Any thread may call it.

    The C library returns large blocks to the system at once, which clears each page anew for the next op: this took an
    eighth of the processor's time of a prompt of 512 tokens.
    """

    def __init__(self) -> None:
        self._idle: list[mmap.mmap] = []  # the first one has been idle for longest

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor of any contents. Its memory is taken again when it and all its views are gone."""
        count = math.prod(shape)
        # A tape gives results memory of its own.
        if count * dtype.itemsize < _LARGE_BYTES or _get_current_dispatch_mode() is not None:
            return torch.empty(shape, dtype=dtype)
        block = self._find(count * dtype.itemsize)
        view = memoryview(block)
        weakref.finalize(view, self._give_back, block).atexit = False
        return torch.frombuffer(view, dtype=dtype, count=count).view(shape)

    def _find(self, num_bytes: int) -> mmap.mmap:
        fitting = [block for block in tuple(self._idle) if len(block) >= num_bytes]
        for block in sorted(fitting, key=len):
            try:
                self._idle.remove(block)
            except ValueError:
                continue  # another thread has taken it
            return block
        return mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def _give_back(self, block: mmap.mmap) -> None:
        # This may run within any allocation of Python, so it takes no lock.
        self._idle.append(block)
        with suppress(IndexError):  # another thread has taken them
            while sum(map(len, tuple(self._idle))) > _MAX_IDLE_BYTES:
                self._idle.pop(0)
