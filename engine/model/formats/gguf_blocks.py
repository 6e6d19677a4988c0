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
            found, round_rows = _split(self.kind, blocks, self.form), round_grouped
        else:
            found = convert.split(int(self.kind.type), blocks, self.shape[1], self.form)
            round_rows = convert.round
        return round_rows(self._dequantize(blocks), 8, _GROUP) if found is None else found

    def _dequantize(self, blocks: Tensor) -> Tensor:
        with np.errstate(invalid="ignore", over="ignore"):  # infinite scales are the file's own
            return torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), self.kind.type))


_BITS: dict[Type, Bits] = {
    **dict.fromkeys((Type.Q4_0, Type.Q4_1, Type.Q4_K), 4),
    **dict.fromkeys((Type.Q5_0, Type.Q5_1, Type.Q5_K, Type.MXFP4), 6),
}
_WITH_MINIMUMS = (Type.Q4_1, Type.Q5_1, Type.Q4_K, Type.Q5_K)
_WITH_FIFTH = (Type.Q5_0, Type.Q5_1, Type.Q5_K)  # one more bit of each code is stored apart
_LARGE = (Type.Q4_K, Type.Q5_K)
_SPLIT = (*_BITS, Type.Q8_0)
_MXFP4 = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)  # twice the numbers


def _split(kind: Kind, rows: Tensor, form: Form) -> GroupedInt | None:
    """Return the codes of some rows; None for a type whose codes are not of one step in a group.

    A block has its scale, then its minimum, then for large blocks those of its groups, then the fifth bits, the codes.
    """
    if kind.type not in _SPLIT:
        return None
    blocks = rows.view(-1, kind.block_bytes)
    codes = _read_codes(kind, blocks)
    if kind.type == Type.MXFP4:
        scales, minimums = torch.ldexp(torch.ones(len(blocks), 1), blocks[:, :1].int() - 128), None
    else:
        scales = _read_halves(blocks[:, :2])
        minimums = None if form.is_centred else _read_halves(blocks[:, 2:4])
    if kind.type in _LARGE:
        assert minimums is not None, "large blocks have minimums"
        low, middle, high = blocks[:, 4:16].unflatten(1, (3, 4)).unbind(1)
        scales = scales * torch.cat((low & 63, high & 15 | low >> 6 << 4), dim=1)
        minimums = -(minimums * torch.cat((middle & 63, high >> 4 | middle >> 6 << 4), dim=1))
    lines = [None if each is None else each.view(len(rows), -1) for each in (scales, minimums)]
    assert lines[0] is not None, "every block has a scale"
    return GroupedInt(codes.view(len(rows), -1), lines[0], lines[1], _GROUP, form.bits)


def _read_codes(kind: Kind, blocks: Tensor) -> Tensor:
    """Return the int8 codes of blocks [N, bytes]: the low halves of some bytes, then their high halves."""
    if kind.type == Type.Q8_0:
        return blocks[:, 2:].contiguous().view(torch.int8)
    half = min(kind.block_size // 2, _GROUP)  # bytes whose high halves follow their low ones
    pairs = blocks[:, -kind.block_size // 2 :].unflatten(1, (-1, half))
    codes = torch.stack((pairs & 15, pairs >> 4), dim=2).flatten(1)
    if kind.type == Type.MXFP4:
        return _MXFP4[codes.int()]
    middle = 8
    if kind.type in _WITH_FIFTH:
        middle, num_bytes = 16, kind.block_size // 8
        end = kind.block_bytes - kind.block_size // 2
        fifth = blocks[:, end - num_bytes : end].unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1
        # Small blocks have the bits of eight codes in a byte; a byte of large ones is of one place in each group.
        fifth = fifth.transpose(1, 2) if kind.type in _LARGE else fifth
        codes |= fifth.flatten(1) << 4
    codes = codes.view(torch.int8)
    return codes if kind.type in _WITH_MINIMUMS else codes - middle


def _read_halves(cells: Tensor) -> Tensor:
    return cells.contiguous().view(torch.float16).float()


# By the number of the type in the file.
KINDS = {
    int(each): Kind(each)
    for each in (
        *(Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.Q4_K, Type.Q5_K, Type.Q6_K),
        *(Type.Q2_K, Type.Q3_K, Type.IQ1_S, Type.IQ1_M, Type.IQ2_XXS, Type.IQ2_XS, Type.IQ2_S),
        *(Type.IQ3_XXS, Type.IQ3_S, Type.IQ4_NL, Type.IQ4_XS, Type.TQ1_0, Type.TQ2_0, Type.MXFP4, Type.NVFP4),
    )
}
