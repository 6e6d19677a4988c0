"""HostStore: memory for blocks that leave the KV cache, in RAM or in a file that survives a restart.

    file:   header page (what made the blocks) | slot 0 | slot 1 | ...
    slot:   key length, key, checksum (64 bytes) | keys and values of the block, layer after layer

The core decides what is moved (`engine.transfer.host_tier`). Slots describe themselves, so that a new core, or a new
process with the same file, finds them again. In a file, a slot whose checksum does not fit is empty.
"""

from __future__ import annotations

import logging
import mmap
import os
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.messages import BlockMove
from engine.transfer.units import UnitLayout
from kernels.cpu.panel_memory import map_large_pages

logger = logging.getLogger("troupe.worker")

SLOT_HEADER_BYTES = 64
_MAX_KEY_BYTES, _CHECKSUM = 48, slice(56, 60)
_PAGE_BYTES = 4096


class HostStore:
    """Slots of host memory, each for one block of all layers.

    Args:
        caches: the layers' memories; layers that share memory are counted once.
        path: file to keep the slots in; None: RAM.
        fingerprint: of weights, dtype and KV layout. The blocks of another one are dropped.
        unit_fingerprint, num_units: the same for units, and how many of them a block has; for stores of several cores.

    Raises:
        ConfigError: the memory or the file cannot be had.
    """

    def __init__(
        self,
        caches: Sequence[tuple[Tensor, Tensor]],
        num_slots: int,
        path: str | None,
        fingerprint: str,
        unit_fingerprint: str,
        num_units: int,
    ) -> None:
        self.attach(caches)
        self.num_slots = num_slots
        self._is_file = path is not None
        block_bytes = sum(memory[0].nbytes for memory in self._memories)
        self.layout = UnitLayout(unit_fingerprint, block_bytes // num_units)
        self._part_bytes = [memory[0].nbytes // num_units for memory in self._memories]
        self._num_units = num_units
        self._copied: torch.cuda.Event | None = None  # on CUDA, the last copies
        # A multiple of 64 keeps every layer's part aligned.
        self._slot_bytes = SLOT_HEADER_BYTES + -(-block_bytes // 64) * 64
        num_bytes = num_slots * self._slot_bytes
        try:
            if path is None:
                memory = self._allocate(num_bytes)
            else:
                memory = _map_file(Path(path), num_bytes, f"{fingerprint} {self._slot_bytes}".encode())
        except (OSError, RuntimeError, ValueError) as error:
            where = "RAM" if path is None else f"kv_offload_file={path!r}"
            raise ConfigError(
                f"kv_offload_gb: {num_bytes / 2**30:.1f} GiB of {where} are not available: {error}"
            ) from error
        self._slots = memory.view(num_slots, self._slot_bytes)
        self._bytes = self._slots.numpy()

    def attach(self, caches: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Move blocks of these caches from now on; a sleep frees the old ones."""
        tensors = {tensor.data_ptr(): tensor for pair in caches for tensor in pair}
        self._memories = list(tensors.values())

    def detach(self) -> None:
        """Release the references to the caches."""
        self._memories = []

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
        """Copy blocks in this order."""
        for move in moves:
            slot = self._slots[move.slot]
            if move.is_load:
                self._copy(slot, move.block_id, is_load=True)
                continue
            self.open_slot(move.slot)
            self._copy(slot, move.block_id, is_load=False)
            self.close_slot(move.slot, move.key)
        if moves and self._memories[0].is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def open_slot(self, slot: int) -> None:
        """As HostMemory: an interrupted copy leaves an empty slot."""
        self._bytes[slot, 0] = 0

    def close_slot(self, slot: int, key: bytes) -> None:
        """As HostMemory."""
        header = key.ljust(_CHECKSUM.start - 1, b"\0")
        header += self._compute_checksum(slot) if self._is_file else bytes(4)
        self._bytes[slot, 1 : _CHECKSUM.stop] = np.frombuffer(header, dtype=np.uint8)
        self._bytes[slot, 0] = len(key)

    def list_parts(self, slot: int, index: int) -> list[np.ndarray]:
        """As HostMemory."""
        if self._num_units == 1:
            return [self._bytes[slot, SLOT_HEADER_BYTES : SLOT_HEADER_BYTES + self.layout.num_bytes]]
        parts, start = [], SLOT_HEADER_BYTES
        for num_bytes in self._part_bytes:
            parts.append(self._bytes[slot, start + index * num_bytes : start + (index + 1) * num_bytes])
            start += self._num_units * num_bytes
        return parts

    def wait_copied(self) -> None:
        """As HostMemory."""
        if self._copied is not None:
            self._copied.synchronize()

    def _copy(self, slot: Tensor, block_id: int, is_load: bool) -> None:
        start = SLOT_HEADER_BYTES
        for memory in self._memories:
            block = memory[block_id].view(-1).view(torch.uint8)
            part = slot[start : start + block.numel()]
            start += block.numel()
            if is_load:
                block.copy_(part, non_blocking=True)
            else:
                part.copy_(block, non_blocking=not self._is_file)

    def _compute_checksum(self, slot: int) -> bytes:
        content = self._bytes[slot, SLOT_HEADER_BYTES:].data
        return zlib.crc32(content).to_bytes(4, "little")

    def _allocate(self, num_bytes: int) -> Tensor:
        """Return memory whose slots are empty."""
        if self._memories[0].device.type == "cpu":
            return map_large_pages(num_bytes)
        memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        memory.view(-1, self._slot_bytes)[:, 0] = 0
        return memory


def _map_file(path: Path, num_bytes: int, content: bytes) -> Tensor:
    """Map the slots of a file, which is emptied unless its header names the same content."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        header = content.ljust(_PAGE_BYTES, b"\0")
        if os.pread(descriptor, _PAGE_BYTES, 0) != header:
            if os.fstat(descriptor).st_size:
                logger.info("%s holds blocks of another model or setting; they are dropped", path)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, header, 0)
        os.posix_fallocate(descriptor, 0, _PAGE_BYTES + num_bytes)
        os.ftruncate(descriptor, _PAGE_BYTES + num_bytes)
        mapped = mmap.mmap(descriptor, _PAGE_BYTES + num_bytes)
    finally:
        os.close(descriptor)
    return torch.frombuffer(mapped, dtype=torch.uint8)[_PAGE_BYTES:]
