"""SlotCopier: copies blocks between the KV cache of one rank and slots that hold all KV heads.

slot:  ... | layer 3, keys: [piece, head, elements] | layer 3, values | layer 4, keys ...
                           └─ each rank copies its own heads

A state of all layers, one after another, is cut into parts of the size of a block; a part fills a slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from engine.comm import Comm
from engine.core.actor_messages import BlockMove
from kernels.cpu.pieces import count_piece_slots

HeadPart = tuple[int, int]  # first KV head of a rank, number of KV heads over all ranks
SLOT_HEADER_BYTES = 64


class SlotCopier:
    """One rank's side.

    Args:
        caches: [block, token, head, element], keys and values of each layer; layers that share memory are copied once.
        parts: for each layer, which heads its cache holds.
        states: [snapshot, ...] of each layer with a state.
        has_pieces: see `kernels.ops.KVCache`; else a piece is a token.
    """

    def __init__(
        self, caches: Sequence[tuple[Tensor, Tensor]], parts: Sequence[HeadPart],
        states: Sequence[Tensor] = (), has_pieces: bool = False,
    ) -> None:
        self._parts = parts
        self._has_pieces = has_pieces
        self.attach(caches, states)
        self.part_bytes = [
            memory[0].nbytes // memory.shape[2] * total for memory, (_, total) in self._memories
        ]
        num_bytes = sum(state.shape[1] for state in self._states)
        self._num_state_parts = -(-num_bytes // max(1, sum(self.part_bytes)))

    @property
    def device(self) -> torch.device:
        return self._memories[0][0].device

    def attach(self, caches: Sequence[tuple[Tensor, Tensor]], states: Sequence[Tensor] = ()) -> None:
        """Copy blocks of these caches and states from now on; a sleep frees the old ones."""
        self._states = [state.flatten(1).view(torch.uint8) for state in states if state.numel()]
        pairs = zip(caches, self._parts, strict=True)
        self._memories = list(
            {memory.data_ptr(): (memory, part) for cache, part in pairs for memory in cache}.values()
        )

    def detach(self) -> None:
        self._memories, self._states = [], []

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
        if self._states and move.block_id >= (num_blocks := self._memories[0][0].shape[0]):
            self._copy_state(slot, move.block_id - num_blocks, move.is_load, is_async)
            return
        start = SLOT_HEADER_BYTES
        for (memory, (first, total)), num_bytes in zip(self._memories, self.part_bytes, strict=True):
            block = memory[move.block_id]
            size, num_heads, _ = block.shape
            num_pieces = size // count_piece_slots(size) if self._has_pieces else size
            block = block.view(torch.uint8).view(num_pieces, num_heads, -1)
            whole = slot[start : start + num_bytes].view(num_pieces, total, -1)
            part = whole[:, first : first + num_heads]
            start += num_bytes
            if move.is_load:
                block.copy_(part, non_blocking=True)
            else:
                part.copy_(block, non_blocking=is_async)

    def _copy_state(self, slot: Tensor, number: int, is_load: bool, is_async: bool) -> None:
        """Copy the bytes of all layers that lie in one part of a state."""
        index, part = divmod(number, self._num_state_parts)
        size = sum(self.part_bytes)
        start, at = part * size, 0
        for state in self._states:
            first, last = max(start, at), min(start + size, at + state.shape[1])
            if first < last:
                layer = state[index, first - at : last - at]
                whole = slot[SLOT_HEADER_BYTES + first - start : SLOT_HEADER_BYTES + last - start]
                if is_load:
                    layer.copy_(whole, non_blocking=True)
                else:
                    whole.copy_(layer, non_blocking=is_async)
            at += state.shape[1]
