"""Shard: the part of one checkpoint tensor that a rank holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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

    def find_shape(self, part: torch.Size) -> torch.Size:
        """Return the shape of the whole tensor, given that of this part."""
        return torch.Size((*part[: self.dim], self.size, *part[self.dim + 1 :]))
