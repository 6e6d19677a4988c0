"""Products with a matrix as it is, in grouped codes or in float8: one kernel, with or without experts and a gate.

    codes [out, half] uint8     4 bits: the low half of a byte is an input of the first half of a row, the high half one
                                of the second; 6 and 8 bits: a byte is an input; float8: its bits
    lines [groups, out]         int32: a scale, and a minimum in the high half, float16; float8: a scale, float32

A tile of codes becomes numbers of the inputs' dtype in registers, as the same matrix in 16 bits would hold them; float8
is multiplied with inputs of float8. The sums of a row have one order whatever the other rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops import GatedActivation
from kernels.scaled import FP8, FP8_GROUP
from kernels.triton.launch import FUSED, check_contiguous, check_float, check_shape
from kernels.triton.round_rows import round_rows

# Rows of a tile; the first is used for up to so many rows.
FEW_ROWS, MANY_ROWS = 16, 64
# Outputs of a tile of few rows, and those of a matrix from which it is used: fewer make more programs.
FEW_OUTPUTS = ((64, 16384), (32, 8192), (16, 0))
FEW_EXPERT_OUTPUTS = 32  # there are programs for all experts
BLOCK_BYTES = 128  # of a row of numbers in a step of the inner loop
BLOCK_FLOATS = 64  # of a row of float8, which leaves registers for the scaled sums
NUM_STAGES = 4


@dataclass(frozen=True, slots=True)
class CodedWeight:
    """A matrix [out, in] as the kernel reads it: scale * (code - zero) + minimum, or scale * float8."""

    codes: Tensor
    lines: Tensor
    bits: int  # of a stored code: 4 or 8
    zero: int
    group_size: int
    in_features: int
    is_float: bool = False

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
    IS_FLOAT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    DTYPE: tl.constexpr,
) -> tl.tensor:
    """Return the numbers [outputs, inputs] of a tile; inputs PART * HALF + start on; float8 unscaled."""
    column = start + tl.arange(0, BLOCK_IN)
    # Codes behind a row's last input are there, and meet inputs that are 0.
    row = output.to(tl.int64)[:, None] * HALF
    weight = tl.load(weight_ptr + row + column[None, :], mask=is_output[:, None] & (column < HALF)[None, :], other=0)
    if IS_FLOAT:
        weight = weight.to(tl.float8e4nv, bitcast=True)
    elif BITS < 16:
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


@triton.jit
def multiply_tile(
    total: tl.tensor,
    x: tl.tensor,
    x_scale: tl.tensor,
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
    IS_FLOAT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
) -> tl.tensor:
    """Return the sums [outputs, rows] with the products of some inputs x [inputs, rows]."""
    weight = load_weight(
        weight_ptr, lines_ptr, output, is_output, start,
        NUM_OUTPUTS, WIDTH, HALF, BITS, ZERO, PART, GROUP, IS_FLOAT, BLOCK_IN, x.dtype,
    )  # fmt: skip
    product = tl.dot(weight, x, input_precision="ieee")
    if IS_FLOAT:
        scale = tl.load(lines_ptr + output + start // GROUP * NUM_OUTPUTS, mask=is_output, other=0.0)
        product *= scale[:, None] * x_scale[None, :]
    return total + product


@triton.jit(do_not_specialize=["num_rows"])
def product_kernel(
    out_ptr: tl.tensor,
    x_ptr: tl.tensor,
    x_scales_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    lines_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    tile_experts_ptr: tl.tensor,
    tile_starts_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    num_rows: int,
    alpha: tl.tensor,
    limit: tl.tensor,
    NUM_OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    SIZE: tl.constexpr,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    GROUP: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    IS_GATED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
) -> None:
    """Multiply a tile of rows with SIZE outputs; if gated, with as many again, and join them.

    With TOP_K the tile is of one expert's rows. Gated products read tokens and write sorted pairs, the others read
    these and write pairs in the order of the tokens.
    """
    place = tl.arange(0, BLOCK_ROWS)
    output = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    is_output = output < SIZE
    first = output.to(tl.int64)
    if TOP_K:
        tile = tl.program_id(1)
        expert = tl.load(tile_experts_ptr + tile).to(tl.int64)
        if expert < 0:
            return
        place += tl.load(tile_starts_ptr + tile)
        is_row = place < tl.load(ends_ptr + expert)
        pair = tl.load(pairs_ptr + place, mask=is_row, other=0).to(tl.int64)
        first += expert * (2 * SIZE if IS_GATED else SIZE)
        x_row = pair // TOP_K if IS_GATED else place.to(tl.int64)
        out_row = place.to(tl.int64) if IS_GATED else pair
    else:
        place += tl.program_id(1) * BLOCK_ROWS
        is_row = place < num_rows
        x_row = place.to(tl.int64)
        out_row = x_row
    result = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
    up = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
    for start in range(0, HALF, BLOCK_IN):
        for part in tl.static_range(2 if BITS == 4 else 1):
            column = part * HALF + start + tl.arange(0, BLOCK_IN)
            mask = is_row[None, :] & (column < WIDTH)[:, None]
            x = tl.load(x_ptr + x_row[None, :] * WIDTH + column[:, None], mask=mask, other=0)
            x_scale = x_row
            if IS_FLOAT:
                x = x.to(tl.float8e4nv, bitcast=True)
                scale_place = x_row * ((WIDTH + GROUP - 1) // GROUP) + start // GROUP
                x_scale = tl.load(x_scales_ptr + scale_place, mask=is_row, other=0.0)
            result = multiply_tile(
                result, x, x_scale, weight_ptr, lines_ptr, first, is_output, start,
                NUM_OUTPUTS, WIDTH, HALF, BITS, ZERO, part, GROUP, IS_FLOAT, BLOCK_IN,
            )  # fmt: skip
            if IS_GATED:
                up = multiply_tile(
                    up, x, x_scale, weight_ptr, lines_ptr, first + SIZE, is_output, start,
                    NUM_OUTPUTS, WIDTH, HALF, BITS, ZERO, part, GROUP, IS_FLOAT, BLOCK_IN,
                )  # fmt: skip
    if HAS_BIAS:
        result += tl.load(bias_ptr + first, mask=is_output, other=0.0).to(tl.float32)[:, None]
        if IS_GATED:
            up += tl.load(bias_ptr + first + SIZE, mask=is_output, other=0.0).to(tl.float32)[:, None]
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    if IS_GATED:
        # Rounded as gate and up are between two launches.
        result, up = result.to(DTYPE).to(tl.float32), up.to(DTYPE).to(tl.float32)
        if HAS_LIMIT:
            # Comparisons keep NaN.
            result = tl.where(result > limit, limit, result)
            up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up)) + 1.0
        result = result / (1.0 + tl.exp(-alpha * result)) * up
    target = out_ptr + out_row[None, :] * SIZE + output[:, None]
    tl.store(target, result.to(DTYPE), mask=is_row[None, :] & is_output[:, None])


class Routes(NamedTuple):
    """Which rows of a product belong to which expert; see `kernels.triton.routing.Grouping`."""

    pairs: Tensor
    tile_experts: Tensor
    tile_starts: Tensor
    segment_ends: Tensor
    num_experts: int
    top_k: int
    block_rows: int


def multiply(
    x: Tensor,
    weight: Tensor | CodedWeight,
    bias: Tensor | None,
    out_dtype: torch.dtype | None = None,
    *,
    activation: GatedActivation | None = None,
    routes: Routes | None = None,
) -> Tensor:
    """Return x W^T + b, [T, in] -> [T, out]; with an activation, that of its halves, [T, out / 2].

    With routes the matrix holds one expert's rows after another's, and the result has a row for each pair: see
    `product_kernel`.

    Raises:
        ValueError: x does not fit the matrix.
    """
    check_float("x", x)
    dtype, x = out_dtype or x.dtype, x.contiguous()
    x_scales = lines = None
    form: dict[str, Any] = {"WIDTH": x.shape[1], "BITS": 16, "ZERO": 0, "GROUP": 1, "IS_FLOAT": False}
    check_shape("x", x, (x.shape[0], weight.shape[1]))
    if isinstance(weight, CodedWeight):
        matrix, lines = weight.codes, weight.lines
        form |= {"BITS": weight.bits, "ZERO": weight.zero, "GROUP": weight.group_size, "IS_FLOAT": weight.is_float}
        if weight.is_float:
            codes, x_scales = round_rows(x, torch.finfo(FP8).max, FP8, FP8_GROUP)
            x = codes.view(torch.uint8)
    else:
        matrix = weight
        check_contiguous("weight", weight)
        if weight.dtype != x.dtype:
            raise ValueError(f"the matrix is {weight.dtype}, x is {x.dtype}")
    block_in = BLOCK_FLOATS if form["IS_FLOAT"] else BLOCK_BYTES // x.element_size()
    if form["BITS"] < 16:
        # The largest power of two that divides a group, within bounds.
        block_in = min(block_in, form["GROUP"] & -form["GROUP"])
    num_outputs = matrix.shape[0] // (1 if routes is None else routes.num_experts) // (1 if activation is None else 2)
    block_rows, block_out = MANY_ROWS, FEW_OUTPUTS[0][0]
    if routes is not None:
        block_rows, num_rows, num_tiles = routes.block_rows, len(routes.pairs), len(routes.tile_experts)
        block_out = FEW_EXPERT_OUTPUTS if block_rows == FEW_ROWS else block_out
    else:
        num_rows = x.shape[0]
        if num_rows <= FEW_ROWS:
            block_rows = FEW_ROWS
            block_out = next(block for block, least in FEW_OUTPUTS if num_outputs >= least)
        num_tiles = triton.cdiv(num_rows, block_rows)
    out = torch.empty(num_rows, num_outputs, dtype=dtype, device=x.device)
    if num_rows:
        # Programs start in the order of the first axis: all outputs of a tile of rows run together.
        product_kernel[(triton.cdiv(num_outputs, block_out), num_tiles)](
            *(out, x, x_scales, matrix, lines, bias, *((None,) * 4 if routes is None else routes[:4]), num_rows),
            *((1.0, 0.0) if activation is None else (activation.alpha, activation.limit or 0.0)),
            **form, NUM_OUTPUTS=matrix.shape[0], HALF=matrix.shape[1], SIZE=num_outputs,
            TOP_K=0 if routes is None else routes.top_k, HAS_BIAS=bias is not None,
            HAS_LIMIT=activation is not None and activation.limit is not None, IS_GATED=activation is not None,
            BLOCK_ROWS=block_rows, BLOCK_OUT=block_out, BLOCK_IN=block_in,
            num_warps=block_out // 16, num_stages=NUM_STAGES, **FUSED,
        )  # fmt: skip
    return out
