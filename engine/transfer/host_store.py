"""HostStore: host memory for blocks that leave the KV cache.

    slot:   key length, key (64 bytes) | keys and values of the block, layer after layer

The core decides what is moved (`engine.core.host_tier`). Slots describe themselves, so that a new core finds them.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.core.actor_messages import BlockMove
from engine.device.slot_copier import SLOT_HEADER_BYTES, SlotCopier
from engine.errors import ConfigError
from engine.parallel.commands import MoveBlocks, SlotMap
from engine.parallel.ranks import Ranks
from engine.transfer.units import UnitLayout
from kernels.cpu.panel_memory import map_large_pages


class HostStore:
    """Slots of host memory, each for one block of all layers.

    Args:
        copier: copies blocks of this process's rank.
        ranks: the other ranks, which copy their KV heads; None: there are none.
        unit_fingerprint: of weights, dtype and KV layout, for stores of several cores.
        num_units: of such a store in a block.

    Raises:
        ConfigError: the memory cannot be had.
    """

    def __init__(
        self, copier: SlotCopier, ranks: Ranks | None, num_slots: int, unit_fingerprint: str, num_units: int,
    ) -> None:
        self._copier = copier
        self.num_slots = num_slots
        block_bytes = sum(copier.part_bytes)
        self.layout = UnitLayout(unit_fingerprint, block_bytes // num_units)
        self._num_units = num_units
        self._copied: torch.cuda.Event | None = None  # on CUDA, the last copies
        # A multiple of 64 keeps every layer's part aligned.
        self._slot_bytes = SLOT_HEADER_BYTES + -(-block_bytes // 64) * 64
        num_bytes = num_slots * self._slot_bytes
        try:
            self._map: SlotMap | None = None  # None: memory of this process alone
            if ranks is None:
                memory = self._allocate(num_bytes)
            else:
                descriptor = os.memfd_create("troupe-slots")  # the ranks open it through this process
                weakref.finalize(self, os.close, descriptor)
                os.posix_fallocate(descriptor, 0, num_bytes)
                memory = torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
                self._map = SlotMap(f"/proc/{os.getpid()}/fd/{descriptor}", num_slots, self._slot_bytes)
        except (OSError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"kv_offload_gb: {num_bytes / 2**30:.1f} GiB of RAM are not available: {error}"
            ) from error
        self._slots = memory.view(num_slots, self._slot_bytes)
        self._bytes = self._slots.numpy()
        self.attach_ranks(ranks)

    def attach(
        self, caches: Sequence[tuple[Tensor, Tensor]], states: Sequence[Tensor], ranks: Ranks | None
    ) -> None:
        """Move blocks of these caches and ranks, and states, from now on; a sleep frees the old ones."""
        self._copier.attach(caches, states)
        self.attach_ranks(ranks)

    def attach_ranks(self, ranks: Ranks | None) -> None:
        self._ranks = ranks
        if ranks is not None:
            assert self._map is not None, "slots that ranks share are mapped"
            ranks.open_slots(self._map)

    def detach(self) -> None:
        self._copier.detach()

    def list_stored(self) -> list[tuple[int, bytes]]:
        """Return (slot, key) of all slots that hold a block."""
        found = []
        for slot in range(self.num_slots):
            header = self._bytes[slot, :SLOT_HEADER_BYTES].tobytes()
            key = header[1 : 1 + header[0]]
            if key:
                found.append((slot, key))
        return found

    def move(self, moves: Sequence[BlockMove]) -> None:
        """Copy blocks in this order, and empty the slots of those without a key."""
        stores = [move for move in moves if not move.is_load]
        for move in stores:
            self.open_slot(move.slot)
        copies = [move for move in moves if move.key]
        if self._ranks is None:
            self._copier.copy(self._slots, copies, None, is_async=True)
        else:
            with self._ranks.exchange(MoveBlocks(copies)) as comm:
                self._copier.copy(self._slots, copies, comm, is_async=True)
        for move in stores:
            if move.key:
                self.close_slot(move.slot, move.key)
            else:
                self.open_slot(move.slot)
        if self._copier.device.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record()

    def open_slot(self, slot: int) -> None:
        """Let a slot count as empty until `close_slot`, so that an interrupted copy leaves no wrong block."""
        self._bytes[slot, 0] = 0

    def close_slot(self, slot: int, key: bytes) -> None:
        """Name the block that the slot holds now."""
        self._bytes[slot, 1 : 1 + len(key)] = np.frombuffer(key, dtype=np.uint8)
        self._bytes[slot, 0] = len(key)

    def list_parts(self, slot: int, index: int, is_state: bool) -> list[np.ndarray]:
        """Return the memory of one unit of a slot's block, or of its part of a state."""
        if self._num_units == 1 or is_state:
            start = SLOT_HEADER_BYTES + index * self.layout.num_bytes
            return [self._bytes[slot, start : start + self.layout.num_bytes]]
        parts, start = [], SLOT_HEADER_BYTES
        for num_bytes in self._copier.part_bytes:
            size = num_bytes // self._num_units
            parts.append(self._bytes[slot, start + index * size : start + (index + 1) * size])
            start += num_bytes
        return parts

    def wait_copied(self) -> None:
        """Wait until the copies of earlier steps have ended."""
        if self._copied is not None:
            self._copied.synchronize()

    def _allocate(self, num_bytes: int) -> Tensor:
        """Return memory whose slots are empty."""
        if self._copier.device.type == "cpu":
            return map_large_pages(num_bytes)
        memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        memory.view(-1, self._slot_bytes)[:, 0] = 0
        return memory
