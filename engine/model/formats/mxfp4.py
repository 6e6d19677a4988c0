"""Mxfp4Tensor and Nvfp4Tensor: 4-bit floating-point numbers in blocks with scales.

Source: OCP Microscaling Formats (MX) Specification v1.0, E2M1 elements and E8M0 scales; NVIDIA's form has blocks of 16
with scales in float8, and a scale of the whole matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.grouped import Convert, Form, GroupedInt, GroupedRows, RoundedRows

_HALVES = (0, 1, 2, 3, 4, 6, 8, 12)  # twice the magnitudes
_BLOCK = 32
_EXPONENT_BIAS = 127


@dataclass(frozen=True, slots=True)
class Mxfp4Tensor:
    """A matrix [out, in], or those of all experts [E, out, in]; see `EncodedTensor` and `GroupedRows`."""

    blocks: Tensor  # [..., in / 32, 16] uint8, two numbers each, the first one in the lower half
    scales: Tensor  # [..., in / 32] uint8, exponents of 2 plus 127

    def __post_init__(self) -> None:
        if self.blocks.shape != (*self.scales.shape, _BLOCK // 2):
            raise ValueError(f"blocks {list(self.blocks.shape)} and scales {list(self.scales.shape)} do not fit")

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.scales.shape[:-1], self.scales.shape[-1] * _BLOCK))

    def __getitem__(self, index: int | slice | Tensor) -> Mxfp4Tensor:
        return Mxfp4Tensor(self.blocks[index], self.scales[index])

    def dequantize(self) -> Tensor:
        """Return the numbers in bfloat16, which holds them exactly."""
        if self.blocks.dim() > 3:
            return torch.stack([self[expert].dequantize() for expert in range(len(self.blocks))])
        exponents = self.scales.int() - _EXPONENT_BIAS - 1
        return torch.ldexp(_read_codes(self.blocks).float(), exponents.unsqueeze(-1)).flatten(-2).bfloat16()

    def to_grouped(self) -> GroupedRows:
        """As `EncodedTensor`; exact for scales that float16 holds, from 2 ** -23 to 2 ** 16."""
        return self

    @property
    def form(self) -> Form:
        return Form(6, _BLOCK, is_centred=True)

    def read(self, rows: slice | Tensor, convert: Convert | None = None) -> GroupedInt:
        part = self[rows]
        scales = torch.ldexp(torch.ones(part.scales.shape), part.scales.int() - _EXPONENT_BIAS - 1)
        return GroupedInt(_read_codes(part.blocks).flatten(-2), scales, None, _BLOCK, 6)


@dataclass(frozen=True, slots=True)
class Nvfp4Tensor:
    """A matrix [out, in]; see `EncodedTensor`."""

    pairs: Tensor  # [out, in / 2] uint8, two numbers each, the first one in the lower half
    scales: Tensor  # [out, in / 16] float8
    scale: Tensor  # of the matrix, one number

    def __post_init__(self) -> None:
        if self.pairs.dtype != torch.uint8 or self.pairs.shape != (len(self.scales), self.scales.shape[1] * 8):
            raise ValueError(f"pairs {list(self.pairs.shape)} and scales {list(self.scales.shape)} do not fit")

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.pairs), self.pairs.shape[1] * 2))

    def dequantize(self) -> Tensor:
        """Return the numbers in float32."""
        return self._decode(slice(None))

    def to_grouped(self) -> GroupedRows:
        """As `EncodedTensor`, rounded to 8 bits."""
        return RoundedRows(self._decode, self.shape, 8)

    def _decode(self, rows: slice | Tensor) -> Tensor:
        scales = self.scales[rows].float() * (self.scale.view(1, 1) / 2)
        codes = _read_codes(self.pairs[rows].unflatten(1, (-1, 8)))
        return (codes.float() * scales.unsqueeze(-1)).flatten(1)


def _read_codes(blocks: Tensor) -> Tensor:
    """Return twice the numbers without their scales, [..., n] bytes -> [..., 2 n] int8."""
    table = torch.tensor([*_HALVES, *(-each for each in _HALVES)], dtype=torch.int8)
    pairs = torch.stack((table.repeat(16), table.repeat_interleave(16)), dim=1)
    return pairs[blocks.int()].flatten(-2)
