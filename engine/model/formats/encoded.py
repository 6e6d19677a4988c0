"""EncodedTensor: a matrix as a quantized checkpoint stores it."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from kernels.grouped import GroupedRows


@runtime_checkable
class EncodedTensor(Protocol):
    """A tensor in the codes of a format."""

    @property
    def shape(self) -> torch.Size:
        """Shape of the decoded tensor."""

    def dequantize(self) -> Tensor:
        """Return the values, equal to those of the format's own library bit for bit."""

    def to_grouped(self) -> GroupedRows:
        """Return the matrix in the form of the grouped products: its own codes, or 8 bits nearest to its values."""


def unpack_bits(words: Tensor, num_bits: int) -> Tensor:
    """Split int32 words into their fields, lowest bits first: [..., n] -> [..., n * 32 / bits]."""
    shifts = torch.arange(0, 32, num_bits, dtype=torch.int32)
    fields = (words.unsqueeze(-1) >> shifts) & (2**num_bits - 1)
    return fields.flatten(-2).to(torch.uint8)
