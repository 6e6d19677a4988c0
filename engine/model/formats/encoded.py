"""EncodedTensor: a matrix as a quantized checkpoint stores it."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from kernels.int4 import GroupedInt4


@runtime_checkable
class EncodedTensor(Protocol):
    """A tensor in the codes of a format."""

    @property
    def shape(self) -> torch.Size:
        """Shape of the decoded tensor."""

    def dequantize(self) -> Tensor:
        """Return the values, equal to those of the format's own library bit for bit."""

    @property
    def has_int4(self) -> bool:
        """Whether `to_int4` can be called: the codes have 4 bits, in groups that the int4 products take."""

    def to_int4(self) -> GroupedInt4:
        """Return the matrix with the codes it has."""


def unpack_bits(words: Tensor, num_bits: int) -> Tensor:
    """Split int32 words into their fields, lowest bits first: [..., n] -> [..., n * 32 / bits]."""
    shifts = torch.arange(0, 32, num_bits, dtype=torch.int32)
    fields = (words.unsqueeze(-1) >> shifts) & (2**num_bits - 1)
    return fields.flatten(-2).to(torch.uint8)
