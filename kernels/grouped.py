"""GroupedInt: a matrix in codes of 4 or 8 bits, the form that quantized checkpoints and `--quantization int4` share.

weight[o, i] = scales[o, g] * codes[o, i] + minimums[o, g],   g = i // group_size

Packing reads a matrix as GroupedRows, some rows at a time, so that no second copy of all of it is in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

Bits = Literal[4, 8]

GROUP_SIZE = 64  # of matrices that are rounded to 4 bits
_ROWS_AT_ONCE = 4096  # float32 copies of a large matrix are made of so many rows


class GroupedRows(Protocol):
    """A matrix [out, in] whose rows are converted to grouped codes when they are read."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def group_size(self) -> int: ...

    @property
    def bits(self) -> Bits: ...

    def read(self, rows: slice | Tensor) -> GroupedInt:
        """Return some rows."""


@dataclass(frozen=True, slots=True)
class GroupedInt:
    """A matrix [out, in] with one scale and one minimum per group of inputs; the last group may be shorter."""

    codes: Tensor  # [out, in] uint8, below 2 ** bits
    scales: Tensor  # [out, groups], a float dtype
    minimums: Tensor  # [out, groups]
    group_size: int  # a multiple of 32
    bits: Bits = 4

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def read(self, rows: slice | Tensor) -> GroupedInt:
        """As `GroupedRows`."""
        return replace(self, codes=self.codes[rows], scales=self.scales[rows], minimums=self.minimums[rows])

    def divide_groups(self, group_size: int) -> GroupedInt:
        """Return the same matrix in smaller groups, whose size divides that of the present ones."""
        times, count = self.group_size // group_size, -(-self.shape[1] // group_size)
        scales, minimums = (
            each.repeat_interleave(times, dim=1)[:, :count] for each in (self.scales, self.minimums)
        )
        return replace(self, scales=scales, minimums=minimums, group_size=group_size)

    def dequantize(self) -> Tensor:
        """Return the matrix [out, in] in float32."""
        weight = torch.empty(self.shape)
        for start in range(0, len(weight), _ROWS_AT_ONCE):
            rows = slice(start, start + _ROWS_AT_ONCE)
            scales, minimums = (
                each[rows].float().repeat_interleave(self.group_size, dim=1)[:, : self.shape[1]]
                for each in (self.scales, self.minimums)
            )
            torch.addcmul(minimums, self.codes[rows].float(), scales, out=weight[rows])
        return weight


@dataclass(frozen=True, slots=True)
class RoundedRows:
    """A matrix that is rounded when it is read; see `round_grouped`."""

    read_values: Callable[[slice | Tensor], Tensor]  # some rows, a float dtype
    shape: torch.Size
    bits: Bits = 4
    group_size: int = GROUP_SIZE

    def read(self, rows: slice | Tensor) -> GroupedInt:
        """As `GroupedRows`."""
        return round_grouped(self.read_values(rows), self.bits, self.group_size)


@dataclass(frozen=True, slots=True)
class OrderedRows:
    """The rows of a matrix in another order."""

    source: GroupedRows
    order: Tensor  # [out] int64

    @property
    def shape(self) -> torch.Size:
        return self.source.shape

    @property
    def group_size(self) -> int:
        return self.source.group_size

    @property
    def bits(self) -> Bits:
        return self.source.bits

    def read(self, rows: slice | Tensor) -> GroupedInt:
        """As `GroupedRows`."""
        return self.source.read(self.order[rows])


@dataclass(frozen=True, slots=True)
class StackedRows:
    """Matrices above each other, in the most bits and the smallest groups of a part, which divide the others."""

    parts: Sequence[GroupedRows]

    @property
    def shape(self) -> torch.Size:
        return torch.Size((sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]))

    @property
    def group_size(self) -> int:
        return min(part.group_size for part in self.parts)

    @property
    def bits(self) -> Bits:
        return max(part.bits for part in self.parts)

    def read(self, rows: slice | Tensor) -> GroupedInt:
        """As `GroupedRows`; in slices alone."""
        assert isinstance(rows, slice), "stacked rows are read in their order"
        found, first = [], 0
        for part in self.parts:
            start, end = max(rows.start - first, 0), min(rows.stop - first, part.shape[0])
            if start < end:
                found.append(part.read(slice(start, end)).divide_groups(self.group_size))
            first += part.shape[0]
        return replace(stack(found), bits=self.bits)


def stack(parts: Sequence[GroupedInt]) -> GroupedInt:
    """Put matrices of one group size above each other; codes of fewer bits are stored in the most bits of a part."""
    if len(parts) == 1:
        return parts[0]
    (group_size,) = {part.group_size for part in parts}
    codes, scales, minimums = (
        torch.cat([getattr(part, name) for part in parts]) for name in ("codes", "scales", "minimums")
    )
    return GroupedInt(codes, scales, minimums, group_size, max(part.bits for part in parts))


def round_grouped(weight: Tensor, bits: Bits = 4, group_size: int = GROUP_SIZE) -> GroupedInt:
    """Round a matrix [out, in]: the levels of a group are spread between its least and greatest weight.

    A NaN spoils its group. Scales and minimums are float16, as products store them.
    """
    return stack([_round_rows(rows, bits, group_size) for rows in weight.split(_ROWS_AT_ONCE)])


def _round_rows(weight: Tensor, bits: Bits, group_size: int) -> GroupedInt:
    width, greatest = weight.shape[1], 2**bits - 1
    # The last weight is repeated to fill the last group: that does not change its range.
    filled = F.pad(weight.float().unsqueeze(0), (0, -width % group_size), mode="replicate")[0]
    groups = filled.unflatten(1, (-1, group_size))
    low, high = groups.aminmax(dim=-1, keepdim=True)
    minimums = low.half()
    scales = ((high - minimums.float()) / greatest).half()
    levels = (groups - minimums.float()) / scales.float().where(scales != 0, 1.0)
    codes = levels.round_().clamp_(0, greatest).nan_to_num_(0).to(torch.uint8)
    return GroupedInt(
        codes.flatten(1)[:, :width].contiguous(), scales.squeeze(-1), minimums.squeeze(-1), group_size, bits
    )
