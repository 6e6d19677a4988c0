"""GGUFTensor: a matrix in one of GGUF's block formats, each block with scales of its own.

The package `gguf` decodes all of them; the native ops split the common ones into their own codes.
"""

from __future__ import annotations

from dataclasses import dataclass

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from kernels.grouped import Bits, Convert, Form, GroupedInt, GroupedRows

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
        assert convert is not None, "other ops take the values"
        blocks = self.rows[rows]
        found = convert.split(int(self.kind.type), blocks, self.shape[1], self.form)
        return convert.round(self._dequantize(blocks), 8, _GROUP) if found is None else found

    def _dequantize(self, blocks: Tensor) -> Tensor:
        with np.errstate(invalid="ignore", over="ignore"):  # infinite scales are the file's own
            return torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), self.kind.type))


_BITS: dict[Type, Bits] = {
    **dict.fromkeys((Type.Q4_0, Type.Q4_1, Type.Q4_K), 4),
    **dict.fromkeys((Type.Q5_0, Type.Q5_1, Type.Q5_K, Type.MXFP4), 6),
}
_WITH_MINIMUMS = (Type.Q4_1, Type.Q5_1, Type.Q4_K, Type.Q5_K)
# By the number of the type in the file.
KINDS = {
    int(each): Kind(each)
    for each in (
        *(Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.Q4_K, Type.Q5_K, Type.Q6_K),
        *(Type.Q2_K, Type.Q3_K, Type.IQ1_S, Type.IQ1_M, Type.IQ2_XXS, Type.IQ2_XS, Type.IQ2_S),
        *(Type.IQ3_XXS, Type.IQ3_S, Type.IQ4_NL, Type.IQ4_XS, Type.TQ1_0, Type.TQ2_0, Type.MXFP4, Type.NVFP4),
    )
}
