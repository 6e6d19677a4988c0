"""Root mean square norm of rows, one program a row, with the gate of a recurrence's result if there is one."""

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
    make_output,
    next_power_of_2,
)


@triton.jit
def rms_norm_kernel(
    out_ptr: tl.tensor,
    x_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    gate_stride: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    NUM_WEIGHTS: tl.constexpr,
    HAS_GATE: tl.constexpr,
    IS_GATE_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Norm a row of a token, which has NUM_ROWS."""
    token, row = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    place = (token * NUM_ROWS + row) * SIZE + columns
    x = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + (row % NUM_WEIGHTS) * SIZE + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_GATE:
        gate_row = gate_ptr + token * gate_stride.to(tl.int64) + row * SIZE
        gate = tl.load(gate_row + columns, mask=mask, other=0.0).to(tl.float32)
        gate /= 1.0 + tl.exp(-gate)
        if IS_GATE_FIRST:
            x *= gate
    x = x * tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps) * weight
    if HAS_GATE and not IS_GATE_FIRST:
        x *= gate
    tl.store(out_ptr + place, x.to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """As `kernels.torch.elementwise.rms_norm`, rounded once; `out` is written and returned when given."""
    check_float("x", x)
    num_rows = weight.shape[0] if weight.dim() == 2 else 1
    if weight.shape[-1] != x.shape[-1] or (num_rows > 1 and (x.dim() < 2 or x.shape[-2] != num_rows)):
        raise ValueError(f"weight {tuple(weight.shape)} does not fit x {tuple(x.shape)}")
    x = x.contiguous()
    result = make_output(out, tuple(x.shape), x)
    _launch(result, x, None, weight, eps, num_rows)
    return result


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, *, is_gate_first: bool
) -> Tensor:
    """Implement `kernels.ops.GatedNorm`, rounded once."""
    check_float("x", x)
    check_contiguous("x", x)
    check_rows("gate", gate)
    if gate.shape != x.shape or x.shape[1] % weight.numel():
        raise ValueError(f"x {tuple(x.shape)}, gate {tuple(gate.shape)} and weight {tuple(weight.shape)} do not fit")
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    _launch(out, x, gate, weight, eps, x.shape[1] // weight.shape[-1], is_gate_first)
    return out


def _launch(
    out: Tensor, x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, num_rows: int, is_gate_first: bool = False
) -> None:
    size = weight.shape[-1]
    block, num_tokens = next_power_of_2(size), x.numel() // (size * num_rows)
    if num_tokens:
        rms_norm_kernel[(num_tokens, num_rows)](
            *(out, x, x if gate is None else gate, weight.contiguous(), 0 if gate is None else gate.stride(0), eps),
            SIZE=size, NUM_ROWS=num_rows, NUM_WEIGHTS=weight.numel() // size,
            HAS_GATE=gate is not None, IS_GATE_FIRST=is_gate_first, BLOCK=block,
            num_warps=count_warps(block), **FUSED,
        )  # fmt: skip
