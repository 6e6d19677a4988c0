"""GGUFTensor: a matrix in one of GGUF's block formats, each block with scales of its own.

The package `gguf` decodes all of them; the common ones are split into the codes of products.
"""

from __future__ import annotations

from dataclasses import dataclass

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from kernels.grouped import Bits, Convert, Form, GroupedInt, GroupedRows, round_grouped

_ROWS_AT_ONCE = 2048  # limits the memory of intermediate values
_GROUP = 32


@dataclass(frozen=True, slots=True)
class Kind:
    """One block format."""

    type: Type

    @property
    def name(self) -> str:
        return self.type.name

    @property
    def block_size(self) -> int:
        return gguf.GGML_QUANT_SIZES[self.type][0]

    @property
    def block_bytes(self) -> int:
        return gguf.GGML_QUANT_SIZES[self.type][1]


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A matrix in blocks; see `EncodedTensor` and `GroupedRows`."""

    kind: Kind
    rows: Tensor  # [out, bytes] uint8
    shape: torch.Size

    def select_rows(self, order: Tensor) -> GGUFTensor:
        """Return the matrix with its rows in another order."""
        return GGUFTensor(self.kind, self.rows[order], torch.Size((len(order), *self.shape[1:])))

    def dequantize(self) -> Tensor:
        parts = [self._dequantize(rows) for rows in self.rows.split(_ROWS_AT_ONCE)]
        return torch.cat(parts).view(self.shape)

    def to_grouped(self) -> GroupedRows:
        """As `EncodedTensor`; exact for blocks that have a scale per 32 weights."""
        return self

    @property
    def form(self) -> Form:
        return Form(_BITS.get(self.kind.type, 8), _GROUP, self.kind.type not in _WITH_MINIMUMS)

    def read(self, rows: slice | Tensor, convert: Convert | None = None) -> GroupedInt:
        blocks = self.rows[rows]
        if convert is None:
            found, round_rows = self._split(blocks), round_grouped
        else:
            found, round_rows = (
                convert.split(int(self.kind.type), blocks, self.shape[1], self.form),
                convert.round,
            )
        return round_rows(self._dequantize(blocks), 8, _GROUP) if found is None else found

    def _split(self, blocks: Tensor) -> GroupedInt | None:
        """Return the codes of some rows; None for a type whose codes are not of one step in a group.

        The step and the minimum of a group are what blocks decode to whose codes are all 1 or all 0.
        """
        if self.kind.type not in _CODES_AT:
            return None
        start, low_bits = _CODES_AT[self.kind.type]
        zeros = blocks.clone()
        cells = zeros.view(len(blocks), -1, self.kind.block_bytes)
        cells[..., start:] = 0
        ones = zeros.clone()
        ones.view_as(cells)[..., low_bits:] = 1 if self.form.bits == 8 else 0x11
        values, zero, one = (
            self._dequantize(each).unflatten(1, (-1, _GROUP)) for each in (blocks, zeros, ones)
        )
        least, scales = zero[..., 0], (one - zero)[..., 0]
        minimums = None if self.form.is_centred else least
        steps = (values if minimums is None else values - least.unsqueeze(-1)) / scales.unsqueeze(-1)
        codes = steps.nan_to_num_(0.0, 0.0, 0.0).round_()
        if minimums is not None:
            codes.clamp_(0, 15 if self.form.bits == 4 else 31)  # steps far below their minimum are not precise
        return GroupedInt(codes.to(torch.int8).flatten(1), scales, minimums, _GROUP, self.form.bits)

    def _dequantize(self, blocks: Tensor) -> Tensor:
        with np.errstate(invalid="ignore", over="ignore"):  # infinite scales are the file's own
            return torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), self.kind.type))


_BITS: dict[Type, Bits] = {
    **dict.fromkeys((Type.Q4_0, Type.Q4_1, Type.Q4_K), 4),
    **dict.fromkeys((Type.Q5_0, Type.Q5_1, Type.Q5_K, Type.MXFP4), 6),
}
_WITH_MINIMUMS = (Type.Q4_1, Type.Q5_1, Type.Q4_K, Type.Q5_K)
# The first byte of a block's codes, and of their lowest bits.
_CODES_AT: dict[Type, tuple[int, int]] = {
    Type.Q4_0: (2, 2), Type.Q4_1: (4, 4), Type.Q4_K: (16, 16), Type.Q8_0: (2, 2), Type.MXFP4: (1, 1),
    Type.Q5_0: (2, 6), Type.Q5_1: (4, 8), Type.Q5_K: (16, 48),
}  # fmt: skip
# By the number of the type in the file.
KINDS = {
    int(each): Kind(each)
    for each in (
        *(Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.Q4_K, Type.Q5_K, Type.Q6_K),
        *(Type.Q2_K, Type.Q3_K, Type.IQ1_S, Type.IQ1_M, Type.IQ2_XXS, Type.IQ2_XS, Type.IQ2_S),
        *(Type.IQ3_XXS, Type.IQ3_S, Type.IQ4_NL, Type.IQ4_XS, Type.TQ1_0, Type.TQ2_0, Type.MXFP4, Type.NVFP4),
    )
}
