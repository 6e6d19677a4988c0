"""GroupedTensor: integer codes with scales and zero points per group, of AWQ, GPTQ and compressed-tensors.

    weight[o, i] = (codes[o, i] - zeros[o, g]) * scales[o, g]

Layouts of `bits`-bit fields in int32 words, lowest bits first:

    AWQ (gemm)           qweight [in, out / 8], columns in the order 0 2 4 6 1 3 5 7; qzeros [groups, out / 8] alike
    GPTQ                 qweight [in * bits / 32, out]; qzeros [groups, out * bits / 32]; g_idx: the group of each input
    compressed-tensors   weight_packed [out, in * bits / 32]; weight_zero_point [out * bits / 32, groups]; both signed
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model.formats.encoded import unpack_bits
from kernels.grouped import Bits, GroupedInt, GroupedRows, RoundedRows

_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # where each column's field is
_UNIT = 32  # inputs; the groups of the products are multiples of it
_LARGEST_GROUP = 128


@dataclass(frozen=True, slots=True)
class GroupedTensor:
    """A matrix [out, in] in codes; see `EncodedTensor`."""

    codes: Tensor  # [out, in] uint8
    zeros: Tensor  # [out, groups] uint8
    scales: Tensor  # [out, groups]
    groups: Tensor  # [in] int64, the group of each input
    num_bits: int

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def dequantize(self) -> Tensor:
        """Return the values in the dtype of the scales, rounded once as the formats' libraries do."""
        return self._read(slice(None))

    def _read(self, rows: slice | Tensor) -> Tensor:
        levels = self.codes[rows].short() - self.zeros[rows][:, self.groups].short()
        return levels.to(self.scales.dtype) * self.scales[rows][:, self.groups]

    def to_grouped(self) -> GroupedRows:
        """As `EncodedTensor`; large groups are divided, because activations are rounded by group."""
        size = -(-self.shape[1] // self.scales.shape[1])
        is_plain = torch.equal(torch.arange(self.shape[1]) // size, self.groups)
        if not is_plain or size % _UNIT or self.num_bits not in (4, 8):
            return RoundedRows(self._read, self.shape, 8, _UNIT)
        step = next(step for step in (_LARGEST_GROUP, 64, _UNIT) if size % step == 0)
        bits: Bits = 4 if self.num_bits == 4 else 8
        columns = self.groups[::step]
        scales, zeros = (each[:, columns].float() for each in (self.scales, self.zeros))
        middle = 2 ** (bits - 1)
        is_centred = bool((self.zeros == middle).all())
        offset = middle if is_centred or bits == 8 else 0
        minimums = None if is_centred else scales * (offset - zeros)
        # The difference of bytes wraps to the signed code.
        return GroupedInt((self.codes - offset).view(torch.int8), scales, minimums, step, bits)


def read_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> GroupedTensor:
    """Return the matrix of AWQ's tensors."""
    codes, zeros = (
        unpack_bits(words, 4).unflatten(1, (-1, 8))[:, :, _AWQ_ORDER].flatten(1).t().contiguous()
        for words in (qweight, qzeros)
    )
    return _group(codes, zeros, scales.t(), None, 4)


def read_gptq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None, zero_offset: int
) -> GroupedTensor:
    """Return the matrix of GPTQ's tensors; `zero_offset` is 1 in the format's first version, which stores z - 1."""
    num_bits = _find_bits(qzeros.shape[1], scales.shape[1])
    codes = unpack_bits(qweight.t().contiguous(), num_bits)
    zeros = unpack_bits(qzeros, num_bits).t() + zero_offset & 2**num_bits - 1
    return _group(codes, zeros, scales.t(), g_idx, num_bits)


def read_compressed(
    packed: Tensor, scales: Tensor, zero_point: Tensor | None, g_idx: Tensor | None, shape: Tensor
) -> GroupedTensor:
    """Return the matrix of pack-quantized tensors of compressed-tensors."""
    rows, columns = shape.tolist()
    num_bits = _find_bits(packed.shape[1], columns)
    codes = unpack_bits(packed, num_bits)[:, :columns]
    scales = scales.view(-1, 1) if scales.dim() < 2 else scales
    middle = torch.full(scales.shape, 2 ** (num_bits - 1), dtype=torch.uint8)
    zeros = middle if zero_point is None else unpack_bits(zero_point.t().contiguous(), num_bits)[:, :rows].t()
    return _group(codes, zeros.expand(rows, -1), scales.expand(rows, -1), g_idx, num_bits)


def _find_bits(num_words: int, num_codes: int) -> int:
    """Return the bits of codes that take so many words of 32 bits."""
    for num_bits in (4, 8):
        if num_words == -(-num_codes * num_bits // 32):
            return num_bits
    raise ValueError(f"{num_codes} codes in {num_words} words do not have 4 or 8 bits")


def _group(
    codes: Tensor, zeros: Tensor, scales: Tensor, g_idx: Tensor | None, num_bits: int
) -> GroupedTensor:
    num_inputs, num_groups = codes.shape[1], scales.shape[1]
    # Optional, and filled with -1 where the order is the plain one.
    is_plain = g_idx is None or bool((g_idx < 0).any())
    order = torch.arange(num_inputs) // -(-num_inputs // num_groups)
    groups = order if is_plain or g_idx is None else g_idx.long()
    is_fit = zeros.shape == scales.shape and len(codes) == len(scales) and len(groups) == num_inputs
    if not is_fit or int(groups.max()) >= num_groups:
        raise ValueError(
            f"codes {list(codes.shape)}, zero points {list(zeros.shape)} and scales {list(scales.shape)} do not fit"
        )
    return GroupedTensor(codes, zeros.contiguous(), scales.contiguous(), groups, num_bits)
