"""Matrices packed for the products of `products.py`, or for torch's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.grouped import GroupedInt, GroupedRows, RoundedRows, StackedRows, cut
from kernels.ops import GatedActivation, PackedWeight, Quantization
from kernels.scaled import FP8, FP8_GROUP, Float8, find_float8
from kernels.torch.linear import linear as multiply_numbers
from kernels.torch.linear import pack_quantized
from kernels.torch.linear import unpack_linear as unpack_numbers
from kernels.triton.products import FEW_ROWS, CodedWeight, multiply
from kernels.triton.round_rows import round_rows
from kernels.triton.silu_mul import silu_mul

ROWS_AT_ONCE = 8192  # that are packed
PART_MULTIPLE = 64  # inputs, at most, of a step of the inner loop, all of one group


def pack_linear(
    weight: Tensor | GroupedRows,
    bias: Tensor | None,
    quantization: Quantization | None,
    dtype: torch.dtype | None = None,
    *,
    device: torch.device,
    has_fp8: bool = False,
) -> PackedWeight:
    """Implement `kernels.ops.PackLinear`: int4 and int6 become codes, int8 and fp8 as torch's products take them.

    Args:
        has_fp8: whether the device multiplies float8; a checkpoint's float8 then stays as it is.
    """
    if isinstance(weight, Tensor):
        weight = weight.to(device, dtype or weight.dtype)
        if quantization is None:
            return weight.contiguous()
        if quantization not in ("int4", "int6"):
            return pack_quantized(weight, quantization, round_rows)
        weight = RoundedRows(weight, weight.shape, 4 if quantization == "int4" else 6)
    return pack_rows([weight], device, has_fp8)


def linear(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """As `kernels.torch.linear.linear`."""
    run = multiply if isinstance(weight, CodedWeight) else multiply_numbers
    return run(x, weight, bias, out_dtype)


def gated_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """Implement `kernels.ops.Ops.gated_linear`: few rows in one launch, others in two."""
    if x.shape[0] <= FEW_ROWS and isinstance(weight, Tensor | CodedWeight):
        return multiply(x, weight, bias, activation=GatedActivation())
    return silu_mul(linear(x, weight, bias))


def unpack_linear(weight: PackedWeight) -> Tensor:
    """Return the matrix [out, in], with the rounding that packing may have done."""
    return unpack_codes(weight) if isinstance(weight, CodedWeight) else unpack_numbers(weight)


def unpack_rows(weight: PackedWeight, ids: Tensor) -> Tensor:
    """Return some rows of a matrix, float32."""
    return unpack_codes(weight, ids) if isinstance(weight, CodedWeight) else F.embedding(ids, weight).float()


def pack_rows(matrices: Sequence[GroupedRows], device: torch.device, has_fp8: bool = False) -> CodedWeight:
    """Lay matrices of one form out above each other, codes some rows at a time."""
    floats = find_float8(StackedRows(matrices)) if has_fp8 else None
    if floats is not None:
        return pack_float8(floats, device)
    parts = [_pack(each.read(rows), device) for each in matrices for rows in cut(each, ROWS_AT_ONCE, 1)]
    codes, lines = torch.cat([part.codes for part in parts]), torch.cat([part.lines for part in parts], dim=1)
    return replace(parts[0], codes=codes, lines=lines)


def _pack(weight: GroupedInt, device: torch.device) -> CodedWeight:
    """Lay a matrix in codes out for the kernel, on the device."""
    zero = 128 if weight.bits > 4 else 8 if weight.minimums is None else 0
    codes = (weight.codes.to(device, torch.int16) + zero).to(torch.uint8)
    width = codes.shape[1]
    if weight.bits == 4:
        half = -(-width // (2 * PART_MULTIPLE)) * PART_MULTIPLE
        filled = F.pad(codes, (0, 2 * half - width))
        codes = filled[:, :half] | filled[:, half:] << 4
    scales = weight.scales.to(device, torch.float16)
    minimums = torch.zeros_like(scales) if weight.minimums is None else weight.minimums.to(device, torch.float16)
    lines = torch.stack((scales.t(), minimums.t()), dim=-1).contiguous().view(torch.int32).squeeze(-1)
    return CodedWeight(codes, lines, 4 if weight.bits == 4 else 8, zero, weight.group_size, width)


def pack_float8(weight: Float8, device: torch.device) -> CodedWeight:
    """Lay a matrix of float8 out for the kernel, on the device."""
    codes, lines = weight.values.view(torch.uint8).to(device), weight.scales.t().contiguous().to(device)
    return CodedWeight(codes.contiguous(), lines, 8, 0, FP8_GROUP, codes.shape[1], is_float=True)


def unpack_codes(weight: CodedWeight, rows: Tensor | slice = slice(None)) -> Tensor:
    """Return some rows of a matrix in codes, float32."""
    codes, width = weight.codes[rows], weight.in_features
    if weight.is_float:
        return Float8(codes.view(FP8), weight.lines[:, rows].t()).dequantize()
    if weight.bits == 4:
        codes = torch.cat((codes & 15, codes >> 4), dim=1)[:, :width]
    lines = weight.lines[:, rows].t().unsqueeze(-1).contiguous().view(torch.float16).float()
    scales, minimums = lines.repeat_interleave(weight.group_size, dim=1)[:, :width].unbind(-1)
    return (codes.float() - weight.zero) * scales + minimums
