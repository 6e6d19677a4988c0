"""EncodedTensor: a matrix as a quantized checkpoint stores it, and parts of one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from engine.model.shard import Shard
from kernels.grouped import GROUP_SIZE, ChangedRows, Convert, Form, GroupedInt, GroupedRows


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


@dataclass(frozen=True, slots=True)
class EncodedPart:
    """The rank's rows or inputs of a matrix; see `EncodedTensor`. Inputs start and end at multiples of 32."""

    source: EncodedTensor
    shard: Shard  # of one range

    @property
    def shape(self) -> torch.Size:
        sizes = list(self.source.shape)
        sizes[self.shard.dim] = self.shard.ranges[0][1]
        return torch.Size(sizes)

    def dequantize(self) -> Tensor:
        return self.shard.take(self.source.dequantize())

    def to_grouped(self) -> GroupedRows:
        rows, ((start, length),) = self.source.to_grouped(), self.shard.ranges
        if self.shard.dim == 0:
            return ChangedRows(rows, rows.form, torch.arange(start, start + length))
        return GroupedColumns(rows, start, start + length)


@dataclass(frozen=True, slots=True)
class GroupedColumns:
    """The inputs [start, end) of a matrix in codes, both multiples of 32; see `GroupedRows`."""

    source: GroupedRows
    start: int
    end: int

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.source.shape[0], self.end - self.start))

    @property
    def form(self) -> Form:
        """The form of the source, in groups of 32 if its groups have other borders."""
        form = self.source.form
        fits = self.start % form.group_size == 0 and self.end % form.group_size == 0
        return form if fits else replace(form, group_size=GROUP_SIZE)

    def read(self, rows: slice | Tensor, convert: Convert | None = None) -> GroupedInt:
        found = self.source.read(rows, convert)
        size = self.form.group_size
        found = found if found.group_size == size else found.convert(self.form)
        scales, minimums = (
            None if each is None else each[:, self.start // size : self.end // size].contiguous()
            for each in (found.scales, found.minimums)
        )
        assert scales is not None, "all codes have scales"
        codes = found.codes[:, self.start : self.end].contiguous()
        return GroupedInt(codes, scales, minimums, size, found.bits)


def unpack_bits(words: Tensor, num_bits: int) -> Tensor:
    """Split int32 words into their fields, lowest bits first: [..., n] -> [..., n * 32 / bits]."""
    shifts = torch.arange(0, 32, num_bits, dtype=torch.int32)
    fields = (words.unsqueeze(-1) >> shifts) & (2**num_bits - 1)
    return fields.flatten(-2).to(torch.uint8)
