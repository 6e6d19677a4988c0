"""StageLink: one direction between two ranks of neighbouring stages of a pipeline.

    stage 0 ─▶ stage 1 ─▶ ... ─▶ last stage ─▶ rank 0

A sender never waits. At most as many steps run as there are stages, so that a ring of as many slots suffices: a step
starts only after an older one has passed all links.
"""

from __future__ import annotations

import mmap
import os
import select
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from engine.comm import RankLost

_ALIGNMENT = 64  # bytes


class Arrival(Protocol):
    """Tensors that another rank sends. It is a `Fetch` without arrays."""

    def is_done(self) -> bool:
        """Whether `wait` would return at once."""

    def wait(self) -> list[np.ndarray]:
        """Wait until the tensors are written.

        Raises:
            RankLost: the sender has ended.
        """


class StageLink(Protocol):
    """One end of a link. Tensors of one message have the same shapes on both ends."""

    def send(self, *tensors: Tensor) -> None:
        """Send contiguous tensors.

        Raises:
            RankLost: the receiver has ended.
        """

    def expect(self, *tensors: Tensor) -> Arrival:
        """Have contiguous tensors overwritten by the next message. Messages are waited for in order."""

    def close(self) -> None:
        """End the link."""


class LinkEnd(msgspec.Struct, frozen=True):
    """Descriptors and sizes of one end of a SharedMemoryLink."""

    memory: int
    pipe: int
    num_slots: int
    slot_bytes: int


class SharedMemoryLink:
    """A link between two processes of one machine: a ring of slots, and a pipe with a byte for each filled slot."""

    def __init__(self, end: LinkEnd) -> None:
        shared = mmap.mmap(end.memory, end.num_slots * end.slot_bytes)
        os.close(end.memory)
        self._slots = torch.frombuffer(shared, dtype=torch.uint8).view(end.num_slots, end.slot_bytes)
        self._pipe = end.pipe
        self._poll = select.poll()
        self._poll.register(end.pipe, select.POLLIN)
        self._turn = -1

    def send(self, *tensors: Tensor) -> None:
        for place, tensor in zip(self._next_places(tensors), tensors, strict=True):
            place.copy_(tensor)
        try:
            os.write(self._pipe, b"\0")
        except BrokenPipeError as error:
            raise RankLost("the rank of the next stage has ended") from error

    def expect(self, *tensors: Tensor) -> Arrival:
        return _SlotArrival(self, tensors)

    def has_message(self) -> bool:
        """Whether a slot is filled, or the sender has ended."""
        return bool(self._poll.poll(0))

    def receive(self, tensors: Sequence[Tensor]) -> None:
        """Wait for the next message and copy it."""
        if not os.read(self._pipe, 1):
            raise RankLost("the rank of the stage before has ended")
        for place, tensor in zip(self._next_places(tensors), tensors, strict=True):
            tensor.copy_(place)

    def close(self) -> None:
        """Close the pipe, which ends the other side."""
        os.close(self._pipe)

    def _next_places(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the memory of each tensor in the next slot."""
        self._turn = (self._turn + 1) % len(self._slots)
        slot, start, places = self._slots[self._turn], 0, []
        for tensor in tensors:
            places.append(slot[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
            start += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        return places


@dataclass(slots=True)
class _SlotArrival:
    """The next message of a SharedMemoryLink."""

    link: SharedMemoryLink
    tensors: Sequence[Tensor]
    is_read: bool = False

    def is_done(self) -> bool:
        return self.is_read or self.link.has_message()

    def wait(self) -> list[np.ndarray]:
        if not self.is_read:
            self.link.receive(self.tensors)
            self.is_read = True
        return []


class TorchLink:
    """A link through torch.distributed, whose process group a TorchComm has opened."""

    def __init__(self, peer: int) -> None:
        self._peer = peer
        self._sent: list[tuple[dist.Work, Tensor]] = []  # until they have left

    def send(self, *tensors: Tensor) -> None:
        self._sent = [pair for pair in self._sent if not pair[0].is_completed()]
        try:
            self._sent += [(_start(dist.isend(tensor, self._peer)), tensor) for tensor in tensors]
        except RuntimeError as error:  # torch has no subclass for a lost peer
            raise RankLost(f"rank {self._peer} has ended: {error}") from error

    def expect(self, *tensors: Tensor) -> Arrival:
        return _TorchArrival([_start(dist.irecv(tensor, self._peer)) for tensor in tensors])

    def close(self) -> None:
        """Do nothing: the TorchComm ends the group."""


@dataclass(frozen=True, slots=True)
class _TorchArrival:
    """The next message of a TorchLink."""

    works: list[dist.Work]

    def is_done(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def wait(self) -> list[np.ndarray]:
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as error:  # torch has no subclass for a lost peer
            raise RankLost(f"a rank has ended: {error}") from error
        return []


def _start(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this process is in the group"
    return work


def make_link(num_slots: int, slot_bytes: int) -> tuple[LinkEnd, LinkEnd]:
    """Return the sender's and the receiver's end of a SharedMemoryLink. Only pages that are used take memory."""
    memory = os.memfd_create("troupe-stages", 0)
    os.ftruncate(memory, num_slots * slot_bytes)
    receiving, sending = os.pipe()
    return (
        LinkEnd(memory, sending, num_slots, slot_bytes),
        LinkEnd(os.dup(memory), receiving, num_slots, slot_bytes),
    )
