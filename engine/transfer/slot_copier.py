"""SlotCopier: copies blocks between the KV cache of one rank and slots that hold all KV heads.

slot:  ... | layer 3, keys: [token, head, element] | layer 3, values | layer 4, keys ...
                           └─ each rank copies its own heads
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from engine.messages import BlockMove
from engine.parallel.comm import Comm

HeadPart = tuple[int, int]  # first KV head of a rank, number of KV heads over all ranks
SLOT_HEADER_BYTES = 64


class SlotCopier:
    """One rank's side.

    Args:
        caches: [block, token, head, element], keys and values of each layer; layers that share memory are copied once.
        parts: for each layer, which heads its cache holds.
    """

    def __init__(self, caches: Sequence[tuple[Tensor, Tensor]], parts: Sequence[HeadPart]) -> None:
        self._parts = parts
        self.attach(caches)
        self.part_bytes = [
            memory[0].nbytes // memory.shape[2] * total for memory, (_, total) in self._memories
        ]

    @property
    def device(self) -> torch.device:
        return self._memories[0][0].device

    def attach(self, caches: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy blocks of these caches from now on; a sleep frees the old ones."""
        pairs = zip(caches, self._parts, strict=True)
        self._memories = list(
            {memory.data_ptr(): (memory, part) for cache, part in pairs for memory in cache}.values()
        )

    def detach(self) -> None:
        """Release the references to the caches."""
        self._memories = []

    def copy(self, slots: Tensor, moves: Sequence[BlockMove], comm: Comm | None, is_async: bool) -> None:
        """Copy blocks in this order, at the same time as the other ranks.

        Ranks that hold the same heads write the same bytes; they wait for each other between loads and stores.
        """
        for _, run in groupby(moves, key=lambda move: move.is_load):
            for move in run:
                self._copy(slots[move.slot], move, is_async)
            if comm is not None:
                comm.sum(torch.zeros(1, device=self.device))

    def _copy(self, slot: Tensor, move: BlockMove, is_async: bool) -> None:
        start = SLOT_HEADER_BYTES
        for (memory, (first, total)), num_bytes in zip(self._memories, self.part_bytes, strict=True):
            block = memory[move.block_id]
            size, num_heads, width = block.shape
            block = block.view(torch.uint8)
            whole = slot[start : start + num_bytes].view(size, total, width * memory.dtype.itemsize)
            part = whole[:, first : first + num_heads]
            start += num_bytes
            if move.is_load:
                block.copy_(part, non_blocking=True)
            else:
                part.copy_(block, non_blocking=is_async)
