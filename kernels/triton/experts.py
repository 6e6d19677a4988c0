"""The experts of a mixture: rows sorted by expert on the device, then two products with each expert's matrices.

Nothing is read back: the grid has room for the worst split of the rows over the experts, and programs without rows end
at once. A row's sums are the same whatever the other rows of its tile; tiles are higher in prompts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.grouped import Bits, RoundedRows
from kernels.ops import ExpertRows, ExpertWeights, GatedActivation, Quantization
from kernels.triton.launch import FUSED, check_contiguous, check_float, check_shape
from kernels.triton.linear import CodedWeight, describe, load_weight, pack_rows, unpack_linear
from kernels.triton.routing import group_pairs

# (rows of a tile, average rows per expert from which that tile is used)
LOADS = ((64, 48), (16, 0))
BLOCK_OUT = 64
BLOCK_COMBINE = 1024
# The first is for gate and up, the second for down.
BITS: dict[str, tuple[Bits, Bits]] = {"int4": (4, 6), "int6": (6, 6), "int8": (8, 8)}


@triton.jit
def expert_gate_up_kernel(
    inner_ptr: tl.tensor,
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    lines_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    tile_experts_ptr: tl.tensor,
    tile_starts_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    alpha: tl.tensor,
    limit: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    SIZE: tl.constexpr,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    GROUP: tl.constexpr,
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
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    NUM_OUTPUTS: tl.constexpr = NUM_EXPERTS * 2 * SIZE
    first = expert * (2 * SIZE) + output
    gate = tl.zeros([BLOCK_ROWS, BLOCK_OUT], dtype=tl.float32)
    up = tl.zeros([BLOCK_ROWS, BLOCK_OUT], dtype=tl.float32)
    for start in range(0, HALF, BLOCK_IN):
        for part in tl.static_range(2 if BITS == 4 else 1):
            column = part * HALF + start + tl.arange(0, BLOCK_IN)
            x = tl.load(x_rows + column[None, :], mask=is_row[:, None] & (column < WIDTH)[None, :], other=0.0)
            weight = load_weight(
                weight_ptr, lines_ptr, first, is_output, start,
                NUM_OUTPUTS, WIDTH, HALF, BITS, ZERO, part, GROUP, BLOCK_IN, DTYPE,
            )  # fmt: skip
            gate += tl.dot(x, tl.trans(weight), input_precision="ieee")
            weight = load_weight(
                weight_ptr, lines_ptr, first + SIZE, is_output, start,
                NUM_OUTPUTS, WIDTH, HALF, BITS, ZERO, part, GROUP, BLOCK_IN, DTYPE,
            )  # fmt: skip
            up += tl.dot(x, tl.trans(weight), input_precision="ieee")
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
    lines_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    tile_experts_ptr: tl.tensor,
    tile_starts_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    SIZE: tl.constexpr,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    GROUP: tl.constexpr,
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
    DTYPE: tl.constexpr = inner_ptr.dtype.element_ty
    result = tl.zeros([BLOCK_ROWS, BLOCK_OUT], dtype=tl.float32)
    for start in range(0, HALF, BLOCK_IN):
        for part in tl.static_range(2 if BITS == 4 else 1):
            column = part * HALF + start + tl.arange(0, BLOCK_IN)
            mask = is_row[:, None] & (column < WIDTH)[None, :]
            inner = tl.load(inner_rows + column[None, :], mask=mask, other=0.0)
            weight = load_weight(
                weight_ptr, lines_ptr, expert * SIZE + output, is_output, start,
                NUM_EXPERTS * SIZE, WIDTH, HALF, BITS, ZERO, part, GROUP, BLOCK_IN, DTYPE,
            )  # fmt: skip
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


@dataclass(frozen=True, slots=True)
class TritonExperts:
    """The matrices of all experts of one layer, as they are or in codes, one expert's rows after another's."""

    gate_up: Tensor | CodedWeight  # [E * 2 I, M]
    gate_up_bias: Tensor | None
    down: Tensor | CodedWeight  # [E * M, I]
    down_bias: Tensor | None
    activation: GatedActivation
    num_experts: int


def pack_experts(
    experts: ExpertWeights | ExpertRows, quantization: Quantization | None, *, device: torch.device
) -> TritonExperts:
    """Lay the matrices out for the kernels; int4 has 4 bits in gate and up, and 6 in down.

    Raises:
        ValueError: a quantization that is not made of codes.
    """
    num_experts, biases = len(experts.down), (experts.gate_up_bias, experts.down_bias)
    gate_up: Tensor | CodedWeight
    down: Tensor | CodedWeight
    if isinstance(experts, ExpertRows):
        pairs = zip(experts.gate, experts.up, strict=True)
        gate_up, down = pack_rows([each for pair in pairs for each in pair], device), pack_rows(experts.down, device)
    elif quantization is None:
        gate_up, down = (each.flatten(0, 1).to(device) for each in (experts.gate_up, experts.down))
    elif quantization == "fp8":
        raise ValueError("quantization='fp8' of experts is not available in the triton ops; use int4, int6 or int8")
    else:
        bits = BITS[quantization]
        gate_up, down = (
            pack_rows([RoundedRows(each, each.shape, size) for each in matrices], device)
            for matrices, size in zip((experts.gate_up, experts.down), bits, strict=True)
        )
    return TritonExperts(gate_up, biases[0], down, biases[1], experts.activation, num_experts)


def unpack_experts(experts: TritonExperts) -> ExpertWeights:
    """Return the matrices, with the rounding that packing may have done."""
    matrices = (unpack_linear(each) for each in (experts.gate_up, experts.down))
    gate_up, down = (each.unflatten(0, (experts.num_experts, -1)) for each in matrices)
    return ExpertWeights(gate_up, experts.gate_up_bias, down, experts.down_bias, experts.activation)


def choose_rows(num_pairs: int, num_experts: int) -> int:
    """Return the rows of a tile: a matrix is read once for each."""
    return next(rows for rows, load in LOADS if num_pairs >= load * num_experts)


def run_experts(
    x: Tensor, ids: Tensor, weights: Tensor, experts: TritonExperts, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Implement `kernels.ops.RunExperts`; without reading a value back from the device."""
    (num_tokens, top_k), num_experts = ids.shape, experts.num_experts
    size, inner_size = x.shape[1], experts.gate_up.shape[0] // (2 * num_experts)
    _check(x, ids, weights, experts)
    out = torch.empty_like(x, dtype=out_dtype)
    if not num_tokens:
        return out
    block_rows = choose_rows(ids.numel(), num_experts)
    grouping = group_pairs(ids, num_experts, block_rows)
    rows = (grouping.pairs, grouping.tile_experts, grouping.tile_starts, grouping.segment_ends)
    inner = torch.empty(num_tokens * top_k, inner_size, dtype=x.dtype, device=x.device)
    results = torch.empty(num_tokens * top_k, size, dtype=torch.float32, device=x.device)
    blocks = {"NUM_EXPERTS": num_experts, "BLOCK_ROWS": block_rows, "BLOCK_OUT": BLOCK_OUT}
    blocks |= {"num_warps": 4, **FUSED}
    activation = experts.activation
    matrix, lines, form = describe(experts.gate_up, x)
    # Programs start in the order of the first axis: all outputs of a tile of rows run together.
    expert_gate_up_kernel[(triton.cdiv(inner_size, BLOCK_OUT), len(grouping.tile_experts))](
        *(inner, x, matrix, lines, experts.gate_up_bias, *rows, activation.alpha, activation.limit or 0.0),
        SIZE=inner_size,
        TOP_K=top_k,
        HAS_BIAS=experts.gate_up_bias is not None,
        HAS_LIMIT=activation.limit is not None,
        **(form | blocks),
    )
    matrix, lines, form = describe(experts.down, inner)
    expert_down_kernel[(triton.cdiv(size, BLOCK_OUT), len(grouping.tile_experts))](
        *(results, inner, matrix, lines, experts.down_bias, *rows),
        SIZE=size,
        HAS_BIAS=experts.down_bias is not None,
        **(form | blocks),
    )
    combine_experts_kernel[(num_tokens, triton.cdiv(size, BLOCK_COMBINE))](
        *(out, results, weights), SIZE=size, TOP_K=top_k, BLOCK=BLOCK_COMBINE, num_warps=4, **FUSED
    )
    return out


def _check(x: Tensor, ids: Tensor, weights: Tensor, experts: TritonExperts) -> None:
    check_float("x", x)
    check_shape("x", x, (ids.shape[0], experts.down.shape[0] // experts.num_experts))
    check_shape("weights", weights, tuple(ids.shape))
    for name, tensor in (("x", x), ("weights", weights)):
        check_contiguous(name, tensor)
    if ids.dtype != torch.int64 or weights.dtype != torch.float32:
        raise ValueError(f"ids must be int64 and weights float32, not {ids.dtype} and {weights.dtype}")
