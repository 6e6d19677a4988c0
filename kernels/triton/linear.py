"""Products with matrices in grouped codes, which stay in their own size, and gated products of few rows.

    codes [out, half] uint8     4 bits: the low half of a byte is an input of the first half of a row, the high half one
                                of the second; 6 and 8 bits: a byte is an input
    lines [groups, out] int32   a scale, and a minimum in the high half, float16

A tile of codes becomes numbers of the inputs' dtype in registers, as the same matrix in 16 bits would hold them. The
sums of a row have one order whatever the other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels.grouped import GroupedInt, GroupedRows, RoundedRows, cut
from kernels.ops import PackedWeight, Quantization
from kernels.torch.linear import linear as multiply_numbers
from kernels.torch.linear import pack_quantized
from kernels.torch.linear import unpack_linear as unpack_numbers
from kernels.triton.launch import FUSED, check_contiguous, check_float, check_shape
from kernels.triton.round_rows import round_rows
from kernels.triton.silu_mul import silu_mul

# Rows of a tile; the first is used for up to so many rows.
FEW_ROWS, MANY_ROWS = 16, 64
# Outputs of a tile of few rows, and those of a matrix from which it is used: fewer make more programs.
FEW_OUTPUTS = ((64, 16384), (32, 8192), (16, 0))
ROWS_AT_ONCE = 8192  # that are packed
BLOCK_BYTES = 128  # of a row of numbers in a step of the inner loop
NUM_STAGES = 4
PART_MULTIPLE = 64  # inputs, at most, of a step of the inner loop, all of one group


@dataclass(frozen=True, slots=True)
class CodedWeight:
    """A matrix [out, in] in codes, as the kernel reads it: scale * (code - zero) + minimum."""

    codes: Tensor
    lines: Tensor
    bits: int  # of a stored code: 4 or 8
    zero: int
    group_size: int
    in_features: int

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.codes.shape[0], self.in_features))


@triton.jit
def load_weight(
    weight_ptr: tl.tensor,
    lines_ptr: tl.tensor,
    output: tl.tensor,
    is_output: tl.tensor,
    start: tl.tensor,
    NUM_OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    PART: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    DTYPE: tl.constexpr,
) -> tl.tensor:
    """Return the numbers [outputs, inputs] of a tile; inputs PART * HALF + start on."""
    column = start + tl.arange(0, BLOCK_IN)
    # Codes behind a row's last input are there, and meet inputs that are 0.
    row = output.to(tl.int64)[:, None] * HALF
    weight = tl.load(weight_ptr + row + column[None, :], mask=is_output[:, None] & (column < HALF)[None, :], other=0)
    if BITS < 16:
        code = weight.to(tl.int32)
        if BITS == 4:
            code = (code >> (4 * PART)) & 15
        place = output.to(tl.int64) + (PART * HALF + start) // GROUP * NUM_OUTPUTS
        line = tl.load(lines_ptr + place, mask=is_output & (PART * HALF + start < WIDTH), other=0)
        scale = line.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        least = (line >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        # A code in the last bits of 2 ** 23 is a float32 without a conversion, which is slow.
        number = (code | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + ZERO)
        weight = (number * scale[:, None] + least[:, None]).to(DTYPE)
    return weight


@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    out_ptr: tl.tensor,
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    lines_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    num_rows: int,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    SIZE: tl.constexpr,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
) -> None:
    """Multiply a tile of rows with SIZE outputs; if gated, with as many again, and join them."""
    NUM_OUTPUTS: tl.constexpr = 2 * SIZE if IS_GATED else SIZE
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    output = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    is_row, is_output = row < num_rows, output < SIZE
    x_rows = x_ptr + row.to(tl.int64)[None, :] * WIDTH
    result = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
    up = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
    for start in range(0, HALF, BLOCK_IN):
        for part in tl.static_range(2 if BITS == 4 else 1):
            column = part * HALF + start + tl.arange(0, BLOCK_IN)
            x = tl.load(x_rows + column[:, None], mask=is_row[None, :] & (column < WIDTH)[:, None], other=0.0)
            weight = load_weight(
                weight_ptr, lines_ptr, output, is_output, start,
                NUM_OUTPUTS, WIDTH, HALF, BITS, ZERO, part, GROUP, BLOCK_IN, DTYPE,
            )  # fmt: skip
            result += tl.dot(weight, x, input_precision="ieee")
            if IS_GATED:
                weight = load_weight(
                    weight_ptr, lines_ptr, SIZE + output, is_output, start,
                    NUM_OUTPUTS, WIDTH, HALF, BITS, ZERO, part, GROUP, BLOCK_IN, DTYPE,
                )  # fmt: skip
                up += tl.dot(weight, x, input_precision="ieee")
    if HAS_BIAS:
        result += tl.load(bias_ptr + output, mask=is_output, other=0.0).to(tl.float32)[:, None]
        if IS_GATED:
            up += tl.load(bias_ptr + SIZE + output, mask=is_output, other=0.0).to(tl.float32)[:, None]
    if IS_GATED:
        # Rounded as gate and up are between two launches.
        result, up = result.to(DTYPE).to(tl.float32), up.to(DTYPE).to(tl.float32)
        result = result / (1.0 + tl.exp(-result)) * up
    target = out_ptr + row.to(tl.int64)[None, :] * SIZE + output[:, None]
    tl.store(target, result.to(out_ptr.dtype.element_ty), mask=is_row[None, :] & is_output[:, None])


def pack_linear(
    weight: Tensor | GroupedRows,
    bias: Tensor | None,
    quantization: Quantization | None,
    dtype: torch.dtype | None = None,
    *,
    device: torch.device,
) -> PackedWeight:
    """Implement `kernels.ops.PackLinear`: int4 and int6 become codes, int8 and fp8 as torch's products take them."""
    if isinstance(weight, Tensor):
        weight = weight.to(device, dtype or weight.dtype)
        if quantization is None:
            return weight.contiguous()
        if quantization not in ("int4", "int6"):
            return pack_quantized(weight, quantization, round_rows)
        weight = RoundedRows(weight, weight.shape, 4 if quantization == "int4" else 6)
    return pack_rows([weight], device)


def linear(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """As `kernels.torch.linear.linear`."""
    run = multiply if isinstance(weight, CodedWeight) else multiply_numbers
    return run(x, weight, bias, out_dtype)


def gated_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """Implement `kernels.ops.Ops.gated_linear`: few rows in one launch, others in two."""
    if x.shape[0] <= FEW_ROWS and isinstance(weight, Tensor | CodedWeight):
        return multiply(x, weight, bias, is_gated=True)
    return silu_mul(linear(x, weight, bias))


def unpack_linear(weight: PackedWeight) -> Tensor:
    """Return the matrix [out, in], with the rounding that packing may have done."""
    return unpack_codes(weight) if isinstance(weight, CodedWeight) else unpack_numbers(weight)


def unpack_rows(weight: PackedWeight, ids: Tensor) -> Tensor:
    """Return some rows of a matrix, float32."""
    return unpack_codes(weight, ids) if isinstance(weight, CodedWeight) else F.embedding(ids, weight).float()


def pack_rows(matrices: Sequence[GroupedRows], device: torch.device) -> CodedWeight:
    """Lay matrices of one form out above each other, some rows at a time."""
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


def unpack_codes(weight: CodedWeight, rows: Tensor | slice = slice(None)) -> Tensor:
    """Return some rows of a matrix in codes, float32."""
    codes, width = weight.codes[rows], weight.in_features
    if weight.bits == 4:
        codes = torch.cat((codes & 15, codes >> 4), dim=1)[:, :width]
    lines = weight.lines[:, rows].t().unsqueeze(-1).contiguous().view(torch.float16).float()
    scales, minimums = lines.repeat_interleave(weight.group_size, dim=1)[:, :width].unbind(-1)
    return (codes.float() - weight.zero) * scales + minimums


def describe(weight: Tensor | CodedWeight, x: Tensor) -> tuple[Tensor, Tensor, dict[str, int]]:
    """Return a matrix's numbers or codes, its lines, and the constants of kernels that load it.

    Raises:
        ValueError: x does not fit it.
    """
    form = {"WIDTH": x.shape[1], "BLOCK_IN": BLOCK_BYTES // x.element_size()}
    if isinstance(weight, CodedWeight):
        matrix, lines = weight.codes, weight.lines
        form |= {"BITS": weight.bits, "ZERO": weight.zero, "GROUP": weight.group_size}
        # The largest power of two that divides a group, within bounds.
        form["BLOCK_IN"] = min(form["BLOCK_IN"], weight.group_size & -weight.group_size)
    else:
        matrix = lines = weight
        check_contiguous("weight", weight)
        form |= {"BITS": 16, "ZERO": 0, "GROUP": 1}
        if weight.dtype != x.dtype:
            raise ValueError(f"the matrix is {weight.dtype}, x is {x.dtype}")
    check_shape("x", x, (x.shape[0], weight.shape[1]))
    return matrix, lines, form | {"HALF": matrix.shape[1]}


def multiply(
    x: Tensor,
    weight: Tensor | CodedWeight,
    bias: Tensor | None,
    out_dtype: torch.dtype | None = None,
    *,
    is_gated: bool = False,
) -> Tensor:
    """Return x W^T + b, [T, in] -> [T, out]; if gated, silu(gate) * up of its halves, [T, out / 2]."""
    check_float("x", x)
    x, num_rows = x.contiguous(), x.shape[0]
    matrix, lines, form = describe(weight, x)
    num_outputs = matrix.shape[0] // (2 if is_gated else 1)
    out = torch.empty(num_rows, num_outputs, dtype=out_dtype or x.dtype, device=x.device)
    rows, block_out = MANY_ROWS, FEW_OUTPUTS[0][0]
    if num_rows <= FEW_ROWS:
        rows, block_out = FEW_ROWS, next(block for block, least in FEW_OUTPUTS if num_outputs >= least)
    if num_rows:
        linear_kernel[(triton.cdiv(num_outputs, block_out), triton.cdiv(num_rows, rows))](
            *(out, x, matrix, lines, matrix if bias is None else bias, num_rows),
            **form, SIZE=num_outputs, HAS_BIAS=bias is not None, IS_GATED=is_gated,
            BLOCK_ROWS=rows, BLOCK_OUT=block_out, num_warps=block_out // 16, num_stages=NUM_STAGES, **FUSED,
        )  # fmt: skip
    return out
