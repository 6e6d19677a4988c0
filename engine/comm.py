"""Comm: what the ranks of one model exchange. Every rank calls the same methods in the same order."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class RankLost(ConnectionError):
    """Another rank ended; this model cannot run any more."""


class Comm(Protocol):
    """Exchanges tensors between the ranks of one model.

    Raises:
        RankLost: by every method, if a rank has ended.
    """

    rank: int
    size: int

    def sum(self, part: Tensor) -> Tensor:
        """Return the sum of all ranks' float32 tensors of one shape, added as `fold` does, on every rank."""

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor | None:
        """Return all ranks' parts side by side on rank 0, and None on the others.

        Args:
            part: [R, widths[rank]].
            widths: columns of each rank.
        """

    def collect(self, part: Tensor, counts: Sequence[int]) -> Tensor:
        """Return all ranks' rows, one rank after the other, on every rank.

        Args:
            part: [counts[rank], W] float32.
            counts: rows of each rank.
        """

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite the contiguous tensor with that of rank 0."""

    def close(self) -> None:
        """End the connections."""


def fold(parts: Sequence[Tensor]) -> Tensor:
    """Add tensors in a balanced tree: ((0 + 1) + (2 + 3)) + ...

    The sum of 8 parts has the same bits if 2 or 4 ranks first add their own parts. The number must be a power of two.
    """
    while len(parts) > 1:
        parts = [parts[index] + parts[index + 1] for index in range(0, len(parts), 2)]
    return parts[0]


class TorchComm:
    """Exchanges tensors through torch.distributed: gloo for the CPU, NCCL for CUDA.

    Args:
        store: connects the ranks of all stages; one of them is its master.
        rank, size: in the stage, whose ranks exchange tensors.
        address: of this rank, to which others connect.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, device: torch.device, stage: int = 0,
        num_stages: int = 1, address: str = "127.0.0.1",
    ) -> None:
        self.rank = rank
        self.size = size
        self._first = stage * size  # rank of the stage's first rank in the whole group
        backend = "nccl" if device.type == "cuda" else _name_gloo(address)
        dist.init_process_group(backend, store=store, rank=self._first + rank, world_size=size * num_stages)
        # Every rank takes part in making the groups of all stages.
        groups = [dist.new_group(range(each * size, (each + 1) * size)) for each in range(num_stages)]
        self._group = groups[stage]

    def sum(self, part: Tensor) -> Tensor:
        parts = [torch.empty_like(part) for _ in range(self.size)]
        self._run(lambda: dist.all_gather(parts, part.contiguous(), group=self._group))
        return fold(parts)

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor | None:
        # NCCL gathers equal shapes only.
        widest = max(widths)
        padded = torch.nn.functional.pad(part, (0, widest - part.shape[1])).contiguous()
        parts = [torch.empty_like(padded) for _ in range(self.size)] if self.rank == 0 else None
        self._run(lambda: dist.gather(padded, parts, self._first, group=self._group))
        if parts is None:
            return None
        return torch.cat([each[:, :width] for each, width in zip(parts, widths, strict=True)], dim=1)

    def collect(self, part: Tensor, counts: Sequence[int]) -> Tensor:
        # As in `gather`.
        padded = torch.nn.functional.pad(part, (0, 0, 0, max(counts) - len(part))).contiguous()
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        self._run(lambda: dist.all_gather(parts, padded, group=self._group))
        return torch.cat([each[:count] for each, count in zip(parts, counts, strict=True)])

    def broadcast(self, tensor: Tensor) -> None:
        self._run(lambda: dist.broadcast(tensor, self._first, group=self._group))

    def close(self) -> None:
        dist.destroy_process_group()

    def _run(self, exchange: Callable[[], object]) -> None:
        try:
            exchange()
        except RuntimeError as error:  # torch has no subclass for a lost peer
            raise RankLost(f"rank {self.rank} lost another rank: {error}") from error


def open_store(address: str, size: int) -> dist.TCPStore:
    """Return a store that listens on this address alone."""
    server = socket.create_server((address, 0))
    port, descriptor = server.getsockname()[1], server.detach()  # the store owns it
    return dist.TCPStore(address, port, size, True, wait_for_workers=False, master_listen_fd=descriptor)


def _name_gloo(address: str) -> str:
    """Return the name of a backend that listens on this address, where gloo's own follows the host's name."""
    name = f"gloo_{address.encode().hex()}"  # torch allows few characters

    def make(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stubs lack it
        options._timeout = timeout
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        return dist.ProcessGroupGloo(store, rank, size, options)

    if name not in dist.Backend.backend_list:
        dist.Backend.register_backend(name, make, devices=["cpu"])
    return name
