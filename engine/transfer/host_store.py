"""HostStore: memory for blocks that leave the KV cache, in RAM or in a file that survives a restart.

    file:   header page (what made the blocks) | slot 0 | slot 1 | ...
    slot:   key length, key, checksum (64 bytes) | keys and values of the block, layer after layer

The core decides what is moved (`engine.transfer.host_tier`). Slots describe themselves, so that a new core, or a new
process with the same file, finds them again. In a file, a slot whose checksum does not fit is empty.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import weakref
import zlib
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.messages import BlockMove
from engine.parallel.commands import MoveBlocks, SlotMap
from engine.parallel.ranks import Ranks
from engine.transfer.slot_copier import SLOT_HEADER_BYTES, SlotCopier
from engine.transfer.units import UnitLayout
from kernels.cpu.panel_memory import map_large_pages

logger = logging.getLogger("troupe.worker")

_MAX_KEY_BYTES, _CHECKSUM = 48, slice(56, 60)
_PAGE_BYTES = 4096


class HostStore:
    """Slots of host memory, each for one block of all layers.

    Args:
        copier: copies blocks of this process's rank.
        ranks: the other ranks, which copy their KV heads; None: there are none.
        path: file to keep the slots in; None: RAM.
        fingerprint: of weights, dtype and KV layout. The blocks of another one are dropped.
        unit_fingerprint, num_units: the same for units, and how many of them a block has; for stores of several cores.

    Raises:
        ConfigError: the memory or the file cannot be had.
    """

    def __init__(
        self,
        copier: SlotCopier,
        ranks: Ranks | None,
        num_slots: int,
        path: str | None,
        fingerprint: str,
        unit_fingerprint: str,
        num_units: int,
    ) -> None:
        self.close: Callable[[], object] = lambda: None  # lets other processes use the file
        self._copier = copier
        self.num_slots = num_slots
        self._is_file = path is not None
        block_bytes = sum(copier.part_bytes)
        self.layout = UnitLayout(unit_fingerprint, block_bytes // num_units)
        self._num_units = num_units
        self._copied: torch.cuda.Event | None = None  # on CUDA, the last copies
        # A multiple of 64 keeps every layer's part aligned.
        self._slot_bytes = SLOT_HEADER_BYTES + -(-block_bytes // 64) * 64
        num_bytes = num_slots * self._slot_bytes
        try:
            self._map: SlotMap | None = None  # None: memory of this process alone
            if path is None and ranks is None:
                memory = self._allocate(num_bytes)
            else:
                if path is None:
                    descriptor = os.memfd_create("troupe-slots")  # the ranks open it through this process
                else:
                    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                self.close = weakref.finalize(self, _unlock, descriptor)
                memory = _map_file(descriptor, num_bytes, f"{fingerprint} {self._slot_bytes}".encode())
                path = path or f"/proc/{os.getpid()}/fd/{descriptor}"
                self._map = SlotMap(path, _PAGE_BYTES, num_slots, self._slot_bytes)
        except (OSError, RuntimeError, ValueError) as error:
            where = "RAM" if path is None else f"kv_offload_file={path!r}"
            raise ConfigError(
                f"kv_offload_gb: {num_bytes / 2**30:.1f} GiB of {where} are not available: {error}"
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
        """Let new ranks map the slots."""
        self._ranks = ranks
        if ranks is not None:
            assert self._map is not None, "slots that ranks share are mapped"
            ranks.open_slots(self._map)

    def detach(self) -> None:
        """Release the references to the caches."""
        self._copier.detach()

    def list_stored(self) -> list[tuple[int, bytes]]:
        """Return (slot, key) of all slots that hold a block."""
        found = []
        for slot in range(self.num_slots):
            header = self._bytes[slot, :SLOT_HEADER_BYTES].tobytes()
            key = header[1 : 1 + header[0]]
            if not key:
                continue
            if self._is_file and header[_CHECKSUM] != self._compute_checksum(slot):
                self.open_slot(slot)
                continue
            found.append((slot, key))
        return found

    def move(self, moves: Sequence[BlockMove]) -> None:
        """Copy blocks in this order, and empty the slots of those without a key."""
        stores = [move for move in moves if not move.is_load]
        for move in stores:
            self.open_slot(move.slot)
        copies, is_async = [move for move in moves if move.key], not self._is_file
        if self._ranks is None:
            self._copier.copy(self._slots, copies, None, is_async)
        else:
            with self._ranks.exchange(MoveBlocks(copies)) as comm:
                self._copier.copy(self._slots, copies, comm, is_async)
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
        header = key.ljust(_CHECKSUM.start - 1, b"\0")
        header += self._compute_checksum(slot) if self._is_file else bytes(4)
        self._bytes[slot, 1 : _CHECKSUM.stop] = np.frombuffer(header, dtype=np.uint8)
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

    def _compute_checksum(self, slot: int) -> bytes:
        content = self._bytes[slot, SLOT_HEADER_BYTES:].data
        return zlib.crc32(content).to_bytes(4, "little")

    def _allocate(self, num_bytes: int) -> Tensor:
        """Return memory whose slots are empty."""
        if self._copier.device.type == "cpu":
            return map_large_pages(num_bytes)
        memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        memory.view(-1, self._slot_bytes)[:, 0] = 0
        return memory


def _map_file(descriptor: int, num_bytes: int, content: bytes) -> Tensor:
    """Map the slots of a file, which is emptied unless its header names the same content."""
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # another process would overwrite slots
    header = content.ljust(_PAGE_BYTES, b"\0")
    if os.pread(descriptor, _PAGE_BYTES, 0) != header:
        if os.fstat(descriptor).st_size:
            logger.info("kv_offload_file holds blocks of another model or setting; they are dropped")
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, header, 0)
    os.posix_fallocate(descriptor, 0, _PAGE_BYTES + num_bytes)
    os.ftruncate(descriptor, _PAGE_BYTES + num_bytes)
    return torch.frombuffer(mmap.mmap(descriptor, _PAGE_BYTES + num_bytes), dtype=torch.uint8)[_PAGE_BYTES:]


def _unlock(descriptor: int) -> None:
    """Close a file. The mapping keeps a copy of the descriptor, and would keep the lock."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
