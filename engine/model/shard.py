"""Shard: the part of one checkpoint tensor that a rank holds, and the targets that take only this part."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model.weight_targets import Target


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a checkpoint's tensor that a rank holds: ranges of one dimension."""

    dim: int
    size: int  # of the dimension in the checkpoint
    ranges: tuple[tuple[int, int], ...]  # (start, length)

    def take(self, tensor: Tensor) -> Tensor:
        """Return this part of the tensor. A tensor in a mapped file is read no further."""
        parts = [tensor.narrow(self.dim, start, length) for start, length in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)


@dataclass(frozen=True, slots=True)
class ShardedTarget:
    """Takes a tensor of the checkpoint and copies the rank's part of it to another target."""

    target: Target
    shard: Shard

    @property
    def shape(self) -> torch.Size:
        """Required shape of the checkpoint's tensor."""
        shape = list(self.target.shape)
        shape[self.shard.dim] = self.shard.size
        return torch.Size(shape)

    @property
    def dtype(self) -> torch.dtype | None:
        """As the target."""
        return self.target.dtype

    def copy(self, tensor: Tensor) -> None:
        """Write the rank's part into memory."""
        self.target.copy(self.shard.take(tensor))


@dataclass(frozen=True, slots=True)
class SkippedTarget:
    """A tensor of the checkpoint that another rank holds."""

    shape: torch.Size
    dtype: torch.dtype | None = None

    def copy(self, tensor: Tensor) -> None:
        """Do nothing."""
