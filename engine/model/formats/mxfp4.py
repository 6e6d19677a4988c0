"""Mxfp4Tensor: 4-bit numbers in blocks of 32 with a power of two as scale.

Source: OCP Microscaling Formats (MX) Specification v1.0, E2M1 elements and E8M0 scales.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.grouped import Convert, Form, GroupedInt, GroupedRows

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
        return torch.ldexp(self._read_codes().float(), exponents.unsqueeze(-1)).flatten(-2).bfloat16()

    def to_grouped(self) -> GroupedRows:
        """As `EncodedTensor`; exact for scales that float16 holds, from 2 ** -23 to 2 ** 16."""
        return self

    @property
    def form(self) -> Form:
        return Form(6, _BLOCK, is_centred=True)

    def read(self, rows: slice | Tensor, convert: Convert | None = None) -> GroupedInt:
        part = self[rows]
        scales = torch.ldexp(torch.ones(part.scales.shape), part.scales.int() - _EXPONENT_BIAS - 1)
        return GroupedInt(part._read_codes().flatten(-2), scales, None, _BLOCK, 6)

    def _read_codes(self) -> Tensor:
        """Return twice the numbers without their scales, [..., in / 32, 32] int8."""
        table = torch.tensor([*_HALVES, *(-each for each in _HALVES)], dtype=torch.int8)
        pairs = torch.stack((table.repeat(16), table.repeat_interleave(16)), dim=1)
        return pairs[self.blocks.int()].flatten(-2)
