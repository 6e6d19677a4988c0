"""GGUFTensor: a matrix in one of GGUF's block formats, each block with scales of its own.

Arithmetic is that of the ggml project: float16 scales are widened, products and differences are float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import gguf
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from kernels.grouped import Form, GroupedInt, GroupedRows, round_grouped

_ROWS_AT_ONCE = 2048  # limits the memory of intermediate values
_GROUP = 32
# (codes [blocks, size], scales [blocks, groups], minimums [blocks, groups]) of blocks [blocks, bytes]
Split = Callable[[Tensor], tuple[Tensor, Tensor, Tensor | None]]


@dataclass(frozen=True, slots=True)
class Kind:
    """One block format: weight = scale * code + minimum, with `minimum` None for none."""

    type: Type
    split: Split | None  # None: only the package `gguf` decodes it

    @property
    def name(self) -> str:
        return self.type.name

    @property
    def block_size(self) -> int:
        """Number of weights in a block."""
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
        return Form(4 if self.kind.type in _FOUR_BITS else 8, _GROUP, self.kind.type not in _WITH_MINIMUMS)

    def read(self, selected: slice | Tensor) -> GroupedInt:
        """As `GroupedRows`."""
        rows = self.rows[selected]
        if self.kind not in _EXACT:
            return round_grouped(self._dequantize(rows), 8, _GROUP)
        assert self.kind.split is not None, "the kind has codes"
        codes, scales, minimums = self.kind.split(rows.reshape(-1, self.kind.block_bytes))
        codes, scales = (each.reshape(len(rows), -1) for each in (codes.view(torch.int8), scales))
        minimums = None if minimums is None else minimums.reshape(len(rows), -1)
        return GroupedInt(codes, scales, minimums, _GROUP, self.form.bits)

    def _dequantize(self, rows: Tensor) -> Tensor:
        if self.kind.split is None:
            return torch.from_numpy(gguf.quants.dequantize(rows.numpy(), self.kind.type))
        codes, scales, minimums = self.kind.split(rows.reshape(-1, self.kind.block_bytes))
        num_groups = scales.shape[1]
        values = scales.unsqueeze(2) * codes.view(len(codes), num_groups, -1).float()
        if minimums is not None:
            values += minimums.unsqueeze(2)
        return values.view(len(rows), -1)


def _half(blocks: Tensor, start: int) -> Tensor:
    """A float16 of each block as float32, [blocks, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(data: Tensor, width: int) -> Tensor:
    """Codes of 4 bits: of each `width` bytes first all low halves, then all high halves."""
    parts = data.unflatten(1, (-1, 1, width))
    return torch.cat((parts & 15, parts >> 4), dim=2).flatten(1)


def _bits(data: Tensor, num_bits: int, width: int) -> Tensor:
    """Fields of `num_bits` bits: of each `width` bytes first the lowest fields of all."""
    shifts = torch.arange(0, 8, num_bits, dtype=torch.uint8).view(1, 1, -1, 1)
    return ((data.unflatten(1, (-1, 1, width)) >> shifts) & (2**num_bits - 1)).flatten(1)


def _high_bits_5(blocks: Tensor) -> Tensor:
    """The fifth bits of Q5_0: bit i of a 32-bit word belongs to value i."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((blocks.unsqueeze(2) >> shifts) & 1).flatten(1)


def _split_q4_0(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    return _nibbles(blocks[:, 2:], 16).view(torch.int8) - 8, _half(blocks, 0), None


def _split_q4_1(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    return _nibbles(blocks[:, 4:], 16), _half(blocks, 0), _half(blocks, 2)


def _split_q5_0(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    codes = _nibbles(blocks[:, 6:], 16) | _high_bits_5(blocks[:, 2:6]) << 4
    return codes.to(torch.int8) - 16, _half(blocks, 0), None


def _split_q5_1(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    codes = _nibbles(blocks[:, 8:], 16) | _high_bits_5(blocks[:, 4:8]) << 4
    return codes, _half(blocks, 0), _half(blocks, 2)


def _split_q8_0(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    return blocks[:, 2:].view(torch.int8), _half(blocks, 0), None


def _split_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The scales and minimums of the eight groups of a Q4_K or Q5_K block, [blocks, 8]: six bits of each times d."""
    low, middle, high = blocks[:, 4:16].unflatten(1, (3, 4)).unbind(1)
    scales = torch.cat((low & 63, high & 15 | (low >> 6) << 4), dim=1)
    minimums = torch.cat((middle & 63, high >> 4 | (middle >> 6) << 4), dim=1)
    return _half(blocks, 0) * scales.float(), -(_half(blocks, 2) * minimums.float())


def _split_q4_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    return _nibbles(blocks[:, 16:], 32), *_split_scales(blocks)


def _split_q5_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    codes = _nibbles(blocks[:, 48:], 32) | _bits(blocks[:, 16:48], 1, 32) << 4
    return codes, *_split_scales(blocks)


def _split_q6_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    codes = _nibbles(blocks[:, :128], 64) | _bits(blocks[:, 128:192], 2, 32) << 4
    scales = _half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    return codes.to(torch.int8) - 32, scales, None


_SPLITS = {
    Type.Q4_0: _split_q4_0,
    Type.Q4_1: _split_q4_1,
    Type.Q5_0: _split_q5_0,
    Type.Q5_1: _split_q5_1,
    Type.Q8_0: _split_q8_0,
    Type.Q4_K: _split_q4_k,
    Type.Q5_K: _split_q5_k,
    Type.Q6_K: _split_q6_k,
}
_FOUR_BITS = (Type.Q4_0, Type.Q4_1, Type.Q4_K)
_WITH_MINIMUMS = (Type.Q4_1, Type.Q5_1, Type.Q4_K, Type.Q5_K)
_DECODED = (
    *(Type.Q2_K, Type.Q3_K, Type.IQ1_S, Type.IQ1_M, Type.IQ2_XXS, Type.IQ2_XS, Type.IQ2_S),
    *(Type.IQ3_XXS, Type.IQ3_S, Type.IQ4_NL, Type.IQ4_XS, Type.TQ1_0, Type.TQ2_0, Type.MXFP4, Type.NVFP4),
)
# By the number of the type in the file.
KINDS = {
    int(each): Kind(each, split) for each, split in (_SPLITS | dict.fromkeys(_DECODED)).items()
}
_EXACT = [KINDS[each] for each in _SPLITS if each != Type.Q6_K]  # Q6_K has a scale per 16 weights
