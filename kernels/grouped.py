"""GroupedInt: a matrix in codes of 4, 6 or 8 bits, the form that quantized checkpoints and our own rounding share.

weight[o, i] = scales[o, g] * codes[o, i] + minimums[o, g],   g = i // group_size

Packing reads a matrix as GroupedRows, some rows at a time, so that no second copy of all of it is in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

Bits = Literal[4, 6, 8]

GROUP_SIZE = 32  # of matrices that we round
_ROWS_AT_ONCE = 4096  # float32 copies of a large matrix are made of so many rows
_LEVELS = (14.0, 14.5, 15.0, 15.5, 16.0, 16.5)  # steps between the least and the greatest weight of a group
_TURNS = 3
_ZEROS = {4: 8, 6: 32, 8: 0}  # what is added to centred codes that get minimums


@dataclass(frozen=True, slots=True)
class Form:
    """How codes are stored."""

    bits: Bits
    group_size: int  # a multiple of 32
    is_centred: bool  # without minimums


class RoundRows(Protocol):
    def __call__(self, weight: Tensor, bits: Bits, group_size: int = ...) -> GroupedInt:
        """As `round_grouped`."""


@dataclass(frozen=True, slots=True)
class Convert:
    """Conversions to grouped codes."""

    round: RoundRows
    # (type of GGUF, rows [out, bytes], number of inputs, form) -> codes; None: it does not know the type
    split: Callable[[int, Tensor, int, Form], GroupedInt | None]


class GroupedRows(Protocol):
    """A matrix [out, in] whose rows are converted to grouped codes when they are read."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def form(self) -> Form: ...

    def read(self, rows: slice | Tensor, convert: Convert | None = None) -> GroupedInt:
        """Return some rows, in this form.

        Args:
            convert: faster conversions; None: torch's.
        """


@dataclass(frozen=True, slots=True)
class GroupedInt:
    """A matrix [out, in] with a scale, and perhaps a minimum, per group of inputs; the last group may be shorter."""

    codes: Tensor  # [out, in] int8, from -2 ** (bits - 1); with minimums and 4 or 6 bits from 0
    scales: Tensor  # [out, groups], a float dtype
    minimums: Tensor | None  # [out, groups]; None: the codes are centred, and all are 0
    group_size: int
    bits: Bits = 4

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def form(self) -> Form:
        return Form(self.bits, self.group_size, self.minimums is None)

    def read(self, rows: slice | Tensor, convert: Convert | None = None) -> GroupedInt:
        """As `GroupedRows`."""
        minimums = None if self.minimums is None else self.minimums[rows]
        return replace(self, codes=self.codes[rows], scales=self.scales[rows], minimums=minimums)

    def convert(self, form: Form) -> GroupedInt:
        """Return the same matrix in more bits, in smaller groups, which divide the present ones, or with minimums."""
        codes, scales, minimums = self.codes, self.scales, self.minimums
        if minimums is None and not form.is_centred:
            zero = _ZEROS[self.bits]
            codes, minimums = codes + zero, -zero * scales
        times, count = self.group_size // form.group_size, -(-self.shape[1] // form.group_size)
        if times > 1:
            scales = scales.repeat_interleave(times, dim=1)[:, :count]
            minimums = None if minimums is None else minimums.repeat_interleave(times, dim=1)[:, :count]
        return GroupedInt(codes, scales, minimums, form.group_size, form.bits)

    def dequantize(self) -> Tensor:
        """Return the matrix [out, in] in float32."""
        weight = torch.empty(self.shape, device=self.codes.device)
        for start in range(0, len(weight), _ROWS_AT_ONCE):
            part, target = (each[start : start + _ROWS_AT_ONCE] for each in (self.codes, weight))
            scales = self._spread(self.scales, start)
            if self.minimums is None:
                torch.mul(part.float(), scales, out=target)
            else:
                torch.addcmul(self._spread(self.minimums, start), part.float(), scales, out=target)
        return weight

    def _spread(self, factors: Tensor, start: int) -> Tensor:
        rows = factors[start : start + _ROWS_AT_ONCE].float()
        return rows.repeat_interleave(self.group_size, dim=1)[:, : self.shape[1]]


@dataclass(frozen=True, slots=True)
class RoundedRows:
    """A matrix that is rounded when it is read; see `round_grouped`."""

    source: Tensor | GroupedRows | Callable[[slice | Tensor], Tensor]  # a call returns the values of some rows
    shape: torch.Size
    bits: Bits
    group_size: int = GROUP_SIZE

    @property
    def form(self) -> Form:
        return Form(self.bits, self.group_size, self.bits > 4)

    def read(self, rows: slice | Tensor, convert: Convert | None = None) -> GroupedInt:
        """As `GroupedRows`."""
        round_rows = round_grouped if convert is None else convert.round
        if isinstance(self.source, Tensor):
            values = self.source[rows]
        elif callable(self.source):
            values = self.source(rows)
        else:
            values = self.source.read(rows, convert).dequantize()
        return round_rows(values, self.bits, self.group_size)


@dataclass(frozen=True, slots=True)
class ChangedRows:
    """Rows of a matrix in another order or another form; see `GroupedInt.convert`."""

    source: GroupedRows
    form: Form
    order: Tensor | None = None  # [out] int64, rows of the source

    @property
    def shape(self) -> torch.Size:
        num_rows, num_inputs = self.source.shape
        return torch.Size((num_rows if self.order is None else len(self.order), num_inputs))

    def read(self, rows: slice | Tensor, convert: Convert | None = None) -> GroupedInt:
        """As `GroupedRows`."""
        found = self.source.read(rows if self.order is None else self.order[rows], convert)
        return found if found.form == self.form else found.convert(self.form)


@dataclass(frozen=True, slots=True)
class StackedRows:
    """Matrices of one form above each other."""

    parts: Sequence[GroupedRows]

    @property
    def shape(self) -> torch.Size:
        return torch.Size((sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]))

    @property
    def form(self) -> Form:
        return self.parts[0].form

    def read(self, rows: slice | Tensor, convert: Convert | None = None) -> GroupedInt:
        """As `GroupedRows`; in slices alone."""
        assert isinstance(rows, slice), "stacked rows are read in their order"
        found, first = [], 0
        for part in self.parts:
            start, end = max(rows.start - first, 0), min(rows.stop - first, part.shape[0])
            if start < end:
                found.append(part.read(slice(start, end), convert))
            first += part.shape[0]
        return stack(found)


def cut(weight: GroupedRows, step: int, multiple: int) -> Iterator[slice]:
    """Yield slices of at most `step` rows, from multiples of `multiple`; those of a stack have rows of few parts."""
    parts = weight.parts if isinstance(weight, StackedRows) else (weight,)
    start = end = 0
    for part in parts:
        end += part.shape[0]
        border = min(-(-end // multiple) * multiple, weight.shape[0])
        yield from (slice(at, min(at + step, border)) for at in range(start, border, step))
        start = max(start, border)


def align(parts: Sequence[Tensor | GroupedRows], bits: Bits) -> list[GroupedRows]:
    """Return matrices, some of them in codes, in one form: the most bits and the smallest groups of all.

    Numbers, and codes of more than `bits`, are rounded. The smallest groups must divide the others.
    """
    group_size = min(part.form.group_size for part in parts if not isinstance(part, Tensor))
    rounded: list[GroupedRows] = [
        RoundedRows(part, part.shape, bits, group_size)
        if isinstance(part, Tensor) or part.form.bits > bits
        else part
        for part in parts
    ]
    forms = [part.form for part in rounded]
    form = Form(max(each.bits for each in forms), group_size, all(each.is_centred for each in forms))
    return [part if part.form == form else ChangedRows(part, form) for part in rounded]


def stack(parts: Sequence[GroupedInt]) -> GroupedInt:
    """Put matrices of one form above each other."""
    if len(parts) == 1:
        return parts[0]
    codes, scales = torch.cat([part.codes for part in parts]), torch.cat([part.scales for part in parts])
    minimums = [part.minimums for part in parts if part.minimums is not None]
    return replace(parts[0], codes=codes, scales=scales, minimums=torch.cat(minimums) if minimums else None)


def round_grouped(weight: Tensor, bits: Bits, group_size: int = GROUP_SIZE) -> GroupedInt:
    """Round a matrix [out, in]: centred codes of 6 or 8 bits, or those of 4 bits with the least squared error found.

    A NaN spoils its group. Scales and minimums are float16, as products store them.
    """
    round_rows = _round_4 if bits == 4 else partial(_round_centred, 2 ** (bits - 1) - 1)
    parts = []
    for rows in weight.split(max(1, _ROWS_AT_ONCE * 64 // weight.shape[1])):
        filled = F.pad(rows.float(), (0, -weight.shape[1] % group_size))
        codes, scales, minimums = round_rows(filled.unflatten(1, (-1, group_size)))
        codes = codes.nan_to_num_(0).to(torch.int8).flatten(1)[:, : weight.shape[1]].contiguous()
        parts.append(GroupedInt(codes, scales, minimums, group_size, bits))
    return stack(parts)


def _round_centred(greatest: int, groups: Tensor) -> tuple[Tensor, Tensor, None]:
    scales = (groups.abs().amax(dim=-1) / greatest).half()
    divisors = scales.float().where(scales != 0, 1.0)
    return (groups / divisors.unsqueeze(-1)).round_().clamp_(-greatest, greatest), scales, None


def _round_4(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Try several steps between the codes, and improve each in turns: codes of a line, then the line by least squares.

    `round_lanes` of kernels/cpu/src/blocks.cpp does the same operations in the same order. An infinity spoils its
    group as a NaN does. Source: `make_qkx2_quants` of ggml, which has one turn.
    """
    size = groups.shape[-1]
    values = groups.movedim(-1, 0).contiguous()
    total = _add_halves(values)
    low, high = values.amin(0) + total * 0, values.amax(0)
    least, best = torch.full_like(low, torch.inf), (high - low, low)
    for levels in _LEVELS:
        scales, minimums = (high - low) / levels, low
        for _ in range(_TURNS):
            codes = _find_codes(values, 1 / scales, minimums)
            ones, squares, products = codes.sum(0), codes.square().sum(0), _add_halves(codes * values)
            determinant = size * squares - ones.square()
            scales = (size * products - total * ones) / determinant
            minimums = (squares * total - ones * products) / determinant
        error = _add_halves(codes.mul_(scales).add_(minimums).sub_(values).square_())
        is_better = error < least
        least = torch.where(is_better, error, least)
        best = (torch.where(is_better, scales, best[0]), torch.where(is_better, minimums, best[1]))
    scales, minimums = best[0].half(), best[1].half()
    inverse = (1 / scales.float()).where(scales != 0, 0.0)
    return _find_codes(values, inverse, minimums.float()).movedim(0, -1), scales, minimums


def _add_halves(values: Tensor) -> Tensor:
    """Add along the first dimension: in each 32 halves to halves, until one is left, and these in order."""
    parts = values.unflatten(0, (-1, 32))
    while (half := parts.shape[1] // 2) > 0:
        parts = parts[:, :half] + parts[:, half:]
    return reduce(torch.add, parts[:, 0])


def _find_codes(values: Tensor, inverse: Tensor, minimums: Tensor) -> Tensor:
    """Return the nearest code of each number."""
    return (values - minimums).mul_(inverse).round_().clamp_(0, 15)
