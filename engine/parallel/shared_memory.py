"""SharedMemoryComm: exchanges tensors between ranks on one machine's CPU, through memory that all of them map.

    each rank: write own slot ─▶ barrier ─▶ read the slots of others

There are two slots per rank, used in turn. A rank writes to a slot again only two exchanges later, when all others have
passed the next barrier and so have finished reading it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.comm import RankLost, fold

SLOT_BYTES = 2**26  # only pages that are used take memory


class SharedMemoryComm:
    """One rank's side. A barrier is a byte through a pipe from each rank to each other one: waiting takes no CPU time,
    and the end of a rank is seen at once.

    Args:
        memory: file descriptor of `make_memory`; closed here.
        sending, receiving: pipes to and from each other rank, by rank; owned by the comm.
    """

    def __init__(
        self, rank: int, size: int, memory: int, sending: dict[int, int], receiving: dict[int, int]
    ) -> None:
        self.rank = rank
        self.size = size
        self._sending = sending
        self._receiving = receiving
        self._map = mmap.mmap(memory, memory_bytes(size))
        os.close(memory)
        bytes_ = torch.frombuffer(self._map, dtype=torch.uint8)
        self._slots = bytes_.view(2, size, SLOT_BYTES)
        self._turn = 0

    def sum(self, part: Tensor) -> Tensor:
        out = torch.empty(part.shape, dtype=torch.float32)
        flat, result = part.reshape(-1), out.view(-1)
        step = SLOT_BYTES // 4
        for start in range(0, flat.numel(), step):
            piece = flat[start : start + step]
            slots = self._next_slots(torch.float32, piece.numel())
            slots[self.rank].copy_(piece)
            self._wait()
            if self.size == 2:
                torch.add(slots[0], slots[1], out=result[start : start + step])
            else:
                result[start : start + step] = fold(list(slots))
        return out

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor | None:
        num_rows, dtype = part.shape[0], part.dtype
        out = torch.empty(num_rows, sum(widths), dtype=dtype) if self.rank == 0 else None
        widest = max(widths)
        step = max(1, SLOT_BYTES // (widest * dtype.itemsize))
        for start in range(0, num_rows, step):
            rows = part[start : start + step]
            slots = self._next_slots(dtype, len(rows) * widest)
            slots[self.rank, : rows.numel()].view(rows.shape).copy_(rows)
            self._wait()
            if out is not None:
                column = 0
                for slot, width in zip(slots, widths, strict=True):
                    place = out[start : start + step, column : column + width]
                    place.copy_(slot[: place.numel()].view(place.shape))
                    column += width
        return out

    def collect(self, part: Tensor, counts: Sequence[int]) -> Tensor:
        width = part.shape[1]
        out = torch.empty(sum(counts), width)
        places = out.split(list(counts))
        step = SLOT_BYTES // (4 * width)
        for start in range(0, max(counts), step):
            rows = part[start : start + step]
            slots = self._next_slots(torch.float32, min(step, max(counts) - start) * width)
            slots[self.rank, : rows.numel()].view(rows.shape).copy_(rows)
            self._wait()
            for slot, place in zip(slots, places, strict=True):
                piece = place[start : start + step]
                piece.copy_(slot[: piece.numel()].view(piece.shape))
        return out

    def broadcast(self, tensor: Tensor) -> None:
        flat = tensor.view(-1)
        step = SLOT_BYTES // tensor.element_size()
        for start in range(0, flat.numel(), step):
            piece = flat[start : start + step]
            slot = self._next_slots(tensor.dtype, piece.numel())[0]
            if self.rank == 0:
                slot.copy_(piece)
            self._wait()
            if self.rank:
                piece.copy_(slot)

    def close(self) -> None:
        """Close the pipes, which ends the other ranks."""
        for descriptor in (*self._sending.values(), *self._receiving.values()):
            os.close(descriptor)
        self._sending, self._receiving = {}, {}

    def _next_slots(self, dtype: torch.dtype, count: int) -> Tensor:
        """Return the ranks' slots of this turn, [size, count]."""
        self._turn ^= 1
        return self._slots[self._turn, :, : count * dtype.itemsize].view(dtype)

    def _wait(self) -> None:
        """Wait until all ranks have come here."""
        try:
            for descriptor in self._sending.values():
                os.write(descriptor, b"\0")
            for rank, descriptor in self._receiving.items():
                if not os.read(descriptor, 1):
                    raise RankLost(f"rank {rank} has ended")
        except BrokenPipeError as error:
            raise RankLost("another rank has ended") from error


def memory_bytes(size: int) -> int:
    """Return the bytes of memory that `size` ranks share."""
    return 2 * size * SLOT_BYTES


def make_memory(size: int) -> int:
    """Return the descriptor of a file in memory for `size` ranks, without a name that others could use."""
    descriptor = os.memfd_create("troupe-ranks", 0)
    os.ftruncate(descriptor, memory_bytes(size))
    return descriptor


def make_pipes(size: int) -> tuple[list[dict[int, int]], list[dict[int, int]]]:
    """Return for each rank its pipes to and from each other rank."""
    sending: list[dict[int, int]] = [{} for _ in range(size)]
    receiving: list[dict[int, int]] = [{} for _ in range(size)]
    for source in range(size):
        for target in range(size):
            if source != target:
                receiving[target][source], sending[source][target] = os.pipe()
    return sending, receiving
