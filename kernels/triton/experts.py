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
from kernels.scaled import round_float8
from kernels.triton.launch import FUSED, check_contiguous, check_float, check_shape
from kernels.triton.linear import pack_float8, pack_rows, unpack_linear
from kernels.triton.products import CodedWeight, Routes, multiply
from kernels.triton.routing import group_pairs

# (rows of a tile, average rows per expert from which that tile is used)
LOADS = ((64, 48), (16, 0))
BLOCK_COMBINE = 1024
# The first is for gate and up, the second for down.
BITS: dict[str, tuple[Bits, Bits]] = {"int4": (4, 6), "int6": (6, 6), "int8": (8, 8)}


@triton.jit
def combine_experts_kernel(
    out_ptr: tl.tensor,
    results_ptr: tl.tensor,
    ids_ptr: tl.tensor,
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
        size = tl.where(tl.load(ids_ptr + pair) >= 0, SIZE, 0)
        result = tl.load(results_ptr + pair * SIZE + column, mask=column < size, other=0.0)
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
    experts: ExpertWeights | ExpertRows, quantization: Quantization | None, *, device: torch.device,
    has_fp8: bool = False,
) -> TritonExperts:
    """Lay the matrices out for the kernels; int4 has 4 bits in gate and up, and 6 in down.

    Args:
        has_fp8: whether the device multiplies float8.
    """
    num_experts, biases = len(experts.down), (experts.gate_up_bias, experts.down_bias)
    gate_up: Tensor | CodedWeight
    down: Tensor | CodedWeight
    if isinstance(experts, ExpertRows):
        pairs = zip(experts.gate, experts.up, strict=True)
        gate_up = pack_rows([each for pair in pairs for each in pair], device, has_fp8)
        down = pack_rows(experts.down, device, has_fp8)
    elif quantization is None:
        gate_up, down = (each.flatten(0, 1).to(device) for each in (experts.gate_up, experts.down))
    elif quantization == "fp8":
        matrices = (each.flatten(0, 1) for each in (experts.gate_up, experts.down))
        gate_up, down = (pack_float8(round_float8(each), device) for each in matrices)
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
    size = x.shape[1]
    _check(x, ids, weights, experts)
    out = torch.empty_like(x, dtype=out_dtype)
    if not num_tokens:
        return out
    block_rows = choose_rows(ids.numel(), num_experts)
    grouping = group_pairs(ids, num_experts, block_rows)
    rows = (grouping.pairs, grouping.tile_experts, grouping.tile_starts, grouping.segment_ends)
    routes = Routes(*rows, num_experts, top_k, block_rows)
    inner = multiply(x, experts.gate_up, experts.gate_up_bias, activation=experts.activation, routes=routes)
    results = multiply(inner, experts.down, experts.down_bias, torch.float32, routes=routes)
    combine_experts_kernel[(num_tokens, triton.cdiv(size, BLOCK_COMBINE))](
        *(out, results, ids, weights), SIZE=size, TOP_K=top_k, BLOCK=BLOCK_COMBINE, num_warps=4, **FUSED
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
