"""Root mean square norm and gate of what a recurrence returned, one program a head or group."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import (
    FUSED,
    check_contiguous,
    check_float,
    check_rows,
    count_warps,
    next_power_of_2,
)


@triton.jit
def gated_norm_kernel(
    out_ptr: tl.tensor,
    x_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    gate_stride: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    NUM_WEIGHTS: tl.constexpr,
    IS_GATE_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token, row = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    place = (token * NUM_ROWS + row) * SIZE + columns
    x = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)
    gate_row = gate_ptr + token * gate_stride.to(tl.int64) + row * SIZE
    gate = tl.load(gate_row + columns, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + (row % NUM_WEIGHTS) * SIZE + columns, mask=mask, other=0.0).to(tl.float32)
    gate /= 1.0 + tl.exp(-gate)
    if IS_GATE_FIRST:
        x *= gate
    x *= tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps) * weight
    if not IS_GATE_FIRST:
        x *= gate
    tl.store(out_ptr + place, x.to(out_ptr.dtype.element_ty), mask=mask)


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, *, is_gate_first: bool
) -> Tensor:
    """Implement `kernels.ops.GatedNorm`, rounded once."""
    check_float("x", x)
    check_contiguous("x", x)
    check_rows("gate", gate)
    size, num_tokens = weight.shape[-1], x.shape[0]
    num_rows, num_weights = x.shape[1] // size, weight.numel() // size
    if gate.shape != x.shape or x.shape[1] % size or num_rows % num_weights:
        raise ValueError(f"x {tuple(x.shape)}, gate {tuple(gate.shape)} and weight {tuple(weight.shape)} do not fit")
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    block = next_power_of_2(size)
    if num_tokens:
        gated_norm_kernel[(num_tokens, num_rows)](
            *(out, x, gate, weight.contiguous(), gate.stride(0), eps),
            SIZE=size, NUM_ROWS=num_rows, NUM_WEIGHTS=num_weights, IS_GATE_FIRST=is_gate_first, BLOCK=block,
            num_warps=count_warps(block), **FUSED,
        )  # fmt: skip
    return out
