"""The experts of a mixture: rows sorted by expert on the device, then two products with each expert's matrices.

Nothing is read back: the grid has room for the worst split of the rows over the experts, and programs without rows end
at once. A row's sums are the same whatever the other rows of its tile; tiles are higher in prompts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops import ExpertWeights, Quantization
from kernels.triton.launch import FUSED, check_contiguous, check_float, check_shape
from kernels.triton.routing import group_pairs

# Rows of a tile, and those that an expert has on average from which the tile is used.
LOADS = ((64, 48), (16, 0))
BLOCK_OUT = 64
BLOCK_BYTES = 128  # of a row of weights in a step of the inner loop
BLOCK_COMBINE = 1024


@triton.jit
def expert_gate_up_kernel(
    inner_ptr: tl.tensor,
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    tile_experts_ptr: tl.tensor,
    tile_starts_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    alpha: tl.tensor,
    limit: tl.tensor,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
) -> None:
    tile = tl.program_id(1)
    expert = tl.load(tile_experts_ptr + tile).to(tl.int64)
    if expert < 0:
        return
    place = tl.load(tile_starts_ptr + tile) + tl.arange(0, BLOCK_ROWS)
    is_row = place < tl.load(ends_ptr + expert)
    token = tl.load(pairs_ptr + place, mask=is_row, other=0).to(tl.int64) // TOP_K
    output = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    is_output = output < SIZE
    x_rows = x_ptr + token[:, None] * WIDTH
    gate_rows = weight_ptr + (expert * (2 * SIZE) + output)[:, None] * WIDTH
    up_rows = gate_rows + SIZE * WIDTH
    gate = tl.zeros([BLOCK_ROWS, BLOCK_OUT], dtype=tl.float32)
    up = tl.zeros([BLOCK_ROWS, BLOCK_OUT], dtype=tl.float32)
    for start in range(0, WIDTH, BLOCK_IN):
        column = start + tl.arange(0, BLOCK_IN)
        is_column = (column < WIDTH)[None, :]
        x = tl.load(x_rows + column[None, :], mask=is_row[:, None] & is_column, other=0.0)
        is_weight = is_output[:, None] & is_column
        gate_weight = tl.load(gate_rows + column[None, :], mask=is_weight, other=0.0)
        up_weight = tl.load(up_rows + column[None, :], mask=is_weight, other=0.0)
        gate += tl.dot(x, tl.trans(gate_weight), input_precision="ieee")
        up += tl.dot(x, tl.trans(up_weight), input_precision="ieee")
    if HAS_BIAS:
        bias_row = bias_ptr + expert * (2 * SIZE) + output
        gate += tl.load(bias_row, mask=is_output, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias_row + SIZE, mask=is_output, other=0.0).to(tl.float32)[None, :]
    if HAS_LIMIT:
        # Comparisons keep NaN.
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up)) + 1.0
    inner = gate / (1.0 + tl.exp(-alpha * gate)) * up
    target = inner_ptr + place.to(tl.int64)[:, None] * SIZE + output[None, :]
    tl.store(target, inner.to(inner_ptr.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


@triton.jit
def expert_down_kernel(
    results_ptr: tl.tensor,
    inner_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    tile_experts_ptr: tl.tensor,
    tile_starts_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
) -> None:
    tile = tl.program_id(1)
    expert = tl.load(tile_experts_ptr + tile).to(tl.int64)
    if expert < 0:
        return
    place = tl.load(tile_starts_ptr + tile) + tl.arange(0, BLOCK_ROWS)
    is_row = place < tl.load(ends_ptr + expert)
    pair = tl.load(pairs_ptr + place, mask=is_row, other=0).to(tl.int64)
    output = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    is_output = output < SIZE
    inner_rows = inner_ptr + place.to(tl.int64)[:, None] * WIDTH
    weight_rows = weight_ptr + (expert * SIZE + output)[:, None] * WIDTH
    result = tl.zeros([BLOCK_ROWS, BLOCK_OUT], dtype=tl.float32)
    for start in range(0, WIDTH, BLOCK_IN):
        column = start + tl.arange(0, BLOCK_IN)
        is_column = (column < WIDTH)[None, :]
        inner = tl.load(inner_rows + column[None, :], mask=is_row[:, None] & is_column, other=0.0)
        weight = tl.load(weight_rows + column[None, :], mask=is_output[:, None] & is_column, other=0.0)
        result += tl.dot(inner, tl.trans(weight), input_precision="ieee")
    if HAS_BIAS:
        bias = tl.load(bias_ptr + expert * SIZE + output, mask=is_output, other=0.0)
        result += bias.to(tl.float32)[None, :]
    target = results_ptr + pair[:, None] * SIZE + output[None, :]
    tl.store(target, result, mask=is_row[:, None] & is_output[None, :])


@triton.jit
def combine_experts_kernel(
    out_ptr: tl.tensor,
    results_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for slot in range(TOP_K):
        pair = token * TOP_K + slot
        result = tl.load(results_ptr + pair * SIZE + column, mask=mask, other=0.0)
        total += tl.load(weights_ptr + pair) * result
    tl.store(out_ptr + token * SIZE + column, total.to(out_ptr.dtype.element_ty), mask=mask)


def pack_experts(experts: ExpertWeights, quantization: Quantization | None) -> ExpertWeights:
    """Return the matrices as they are.

    Raises:
        ValueError: a quantization is given.
    """
    if quantization is not None:
        raise ValueError(
            f"quantization={quantization!r} of experts is not available in the triton ops; use quantization=None"
        )
    return experts


def unpack_experts(experts: ExpertWeights) -> ExpertWeights:
    """Return the matrices."""
    return experts


def choose_rows(num_pairs: int, num_experts: int) -> int:
    """Return the rows of a tile: a matrix is read once for each."""
    return next(rows for rows, load in LOADS if num_pairs >= load * num_experts)


def run_experts(
    x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertWeights, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Implement `kernels.ops.RunExperts`; without reading a value back from the device."""
    _check(x, ids, weights, experts)
    num_tokens, top_k = ids.shape
    num_experts, size, inner_size = experts.down.shape
    out = torch.empty_like(x, dtype=out_dtype)
    if not num_tokens:
        return out
    block_rows = choose_rows(ids.numel(), num_experts)
    grouping = group_pairs(ids, num_experts, block_rows)
    rows = (grouping.pairs, grouping.tile_experts, grouping.tile_starts, grouping.segment_ends)
    inner = torch.empty(num_tokens * top_k, inner_size, dtype=x.dtype, device=x.device)
    results = torch.empty(num_tokens * top_k, size, dtype=torch.float32, device=x.device)
    blocks = {"BLOCK_ROWS": block_rows, "BLOCK_OUT": BLOCK_OUT, "BLOCK_IN": BLOCK_BYTES // x.element_size()}
    blocks |= {"num_warps": 4, **FUSED}
    activation = experts.activation
    # Programs start in the order of the first axis: all outputs of a tile of rows run together.
    expert_gate_up_kernel[(triton.cdiv(inner_size, BLOCK_OUT), len(grouping.tile_experts))](
        *(inner, x, experts.gate_up, experts.gate_up_bias, *rows, activation.alpha, activation.limit or 0.0),
        WIDTH=size,
        SIZE=inner_size,
        TOP_K=top_k,
        HAS_BIAS=experts.gate_up_bias is not None,
        HAS_LIMIT=activation.limit is not None,
        **blocks,
    )
    expert_down_kernel[(triton.cdiv(size, BLOCK_OUT), len(grouping.tile_experts))](
        *(results, inner, experts.down, experts.down_bias, *rows),
        WIDTH=inner_size,
        SIZE=size,
        HAS_BIAS=experts.down_bias is not None,
        **blocks,
    )
    combine_experts_kernel[(num_tokens, triton.cdiv(size, BLOCK_COMBINE))](
        *(out, results, weights), SIZE=size, TOP_K=top_k, BLOCK=BLOCK_COMBINE, num_warps=4, **FUSED
    )
    return out


def _check(x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertWeights) -> None:
    check_float("x", x)
    num_experts, size, inner_size = experts.down.shape
    check_shape("x", x, (ids.shape[0], size))
    check_shape("weights", weights, tuple(ids.shape))
    check_shape("gate_up", experts.gate_up, (num_experts, 2 * inner_size, size))
    for name, tensor in (
        ("x", x),
        ("weights", weights),
        ("gate_up", experts.gate_up),
        ("down", experts.down),
    ):
        check_contiguous(name, tensor)
    if experts.down.dtype != x.dtype or experts.gate_up.dtype != x.dtype:
        raise ValueError(f"experts are {experts.gate_up.dtype} and {experts.down.dtype}, x is {x.dtype}")
    if ids.dtype != torch.int64 or weights.dtype != torch.float32:
        raise ValueError(f"ids must be int64 and weights float32, not {ids.dtype} and {weights.dtype}")
