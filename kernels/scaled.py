"""ScaledTensor: a matrix of 8-bit numbers with scales. Other devices round it to 8-bit codes in groups of 32 inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.grouped import ChangedRows, Convert, Form, GroupedInt, GroupedRows, RoundedRows, StackedRows

FP8 = torch.float8_e4m3fn
FP8_GROUP = 128  # inputs that share a scale in products of float8
_CODES = 32  # inputs that share a scale in codes


@dataclass(frozen=True, slots=True)
class ScaledTensor:
    """float8 (e4m3) or int8 values with a scale per matrix, per output or per block of both sides."""

    values: Tensor  # [out, in]
    scales: Tensor  # [], [1], [out, 1] or [row blocks, column blocks]
    block: tuple[int, int] | None = None  # rows and columns of a block; None: as the shape of the scales says

    def __post_init__(self) -> None:
        sizes = self.block or (1, 1)
        blocks = tuple(-(-size // step) for size, step in zip(self.shape, sizes, strict=True))
        if self.scales.dim() == 2 and self.block is not None and self.scales.shape != blocks:
            raise ValueError(f"scales {list(self.scales.shape)} must be {list(blocks)}")

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def form(self) -> Form:
        return Form(8, _CODES, is_centred=True)

    def read(self, rows: slice | Tensor, convert: Convert | None = None) -> GroupedInt:
        """As `kernels.grouped.GroupedRows`: codes nearest to the values."""
        return RoundedRows(self._decode, self.shape, 8, _CODES).read(rows, convert)

    def to_grouped(self) -> GroupedRows:
        return self

    def dequantize(self) -> Tensor:
        """Return the values in the dtype of the scales; in float32 where the scales are powers of two in a byte."""
        return self._decode(slice(None))

    def to_float8(self) -> Float8 | None:
        """Return the values for products of float8; None if they are integers, or their blocks too narrow."""
        scales, (rows, columns) = self._read_scales().float(), self._find_block()
        num_groups = -(-self.shape[1] // FP8_GROUP)
        if self.values.dtype != FP8 or (columns % FP8_GROUP and columns < self.shape[1]):
            return None
        row = torch.arange(self.shape[0], device=scales.device) // rows
        group = torch.arange(num_groups, device=scales.device) * FP8_GROUP // columns
        return Float8(self.values, scales.view(-1, scales.shape[-1] if scales.dim() == 2 else 1)[row][:, group])

    def _decode(self, selected: slice | Tensor) -> Tensor:
        scales, values = self._read_scales(), self.values[selected]
        if scales.dim() == 2:
            rows, columns = self._find_block()
            scales = scales[torch.arange(self.shape[0])[selected] // rows]
            scales = scales.repeat_interleave(columns, 1)[:, : self.shape[1]]
        return values.to(scales.dtype) * scales

    def _read_scales(self) -> Tensor:
        is_power = self.scales.dtype.itemsize == 1
        return self.scales.view(torch.float8_e8m0fnu).float() if is_power else self.scales

    def _find_block(self) -> tuple[int, int]:
        """Return the rows and columns that share a scale."""
        if self.scales.dim() < 2:
            return self.shape[0], self.shape[1]
        rows, columns = self.block or (
            -(-size // count) for size, count in zip(self.shape, self.scales.shape, strict=True)
        )
        return rows, columns


@dataclass(frozen=True, slots=True)
class Float8:
    """A matrix of float8 with a scale for each row and group of `FP8_GROUP` inputs; the last group may be shorter."""

    values: Tensor  # [out, in] float8
    scales: Tensor  # [out, groups] float32

    def dequantize(self) -> Tensor:
        """Return the matrix [out, in] in float32."""
        return self.values.float() * self.scales.repeat_interleave(FP8_GROUP, dim=1)[:, : self.values.shape[1]]


def find_float8(weight: GroupedRows) -> Float8 | None:
    """Return a matrix, which may be ordered or stacked, as the checkpoint's float8; None if some part is none."""
    match weight:
        case ScaledTensor():
            return weight.to_float8()
        case ChangedRows(source, _, order):
            found = find_float8(source)
            if found is None or order is None:
                return found
            # Indexing knows no float8; the bytes are moved.
            return Float8(found.values.view(torch.uint8)[order].view(FP8), found.scales[order])
        case StackedRows(parts):
            return stack_float8([find_float8(part) for part in parts])
    return None


def stack_float8(parts: list[Float8 | None]) -> Float8 | None:
    """Put matrices above each other; None if one is None."""
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    values = torch.cat([part.values.view(torch.uint8) for part in known]).view(FP8)
    return Float8(values, torch.cat([part.scales for part in known]))


def round_float8(weight: Tensor) -> Float8:
    """Round a matrix [out, in]; the greatest number of a group becomes the greatest float8."""
    width, greatest = weight.shape[1], torch.finfo(FP8).max
    groups = F.pad(weight.float(), (0, -width % FP8_GROUP)).unflatten(1, (-1, FP8_GROUP))
    scales = groups.abs().amax(dim=-1).clamp_(min=1e-12).div_(greatest)
    values = groups.div(scales.unsqueeze(-1)).clamp_(-greatest, greatest).flatten(1)[:, :width]
    return Float8(values.to(FP8), scales)
