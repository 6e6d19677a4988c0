"""The residual sum and the norm after it, one program a token."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import (
    FUSED,
    check_contiguous,
    check_float,
    check_shape,
    count_warps,
    make_output,
    next_power_of_2,
)


@triton.jit
def add_rms_norm_kernel(
    out_ptr: tl.tensor,
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    offsets = row * SIZE + columns
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    rounded = (x + residual).to(residual_ptr.dtype.element_ty)
    tl.store(residual_ptr + offsets, rounded, mask=mask)
    # The statistics are those of the rounded sum, which is what later layers see.
    total = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(total * total, axis=0) / SIZE + eps)
    tl.store(out_ptr + offsets, (total * scale * weight).to(out_ptr.dtype.element_ty), mask=mask)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As `kernels.torch.elementwise.add_rms_norm`, of a contiguous residual.

    The normed sum is written to `out` when it is given.
    """
    check_float("x", x)
    check_shape("residual", residual, tuple(x.shape))
    check_contiguous("residual", residual)
    check_shape("weight", weight, (x.shape[-1],))
    x = x.contiguous()
    result = make_output(out, tuple(x.shape), x)
    size = x.shape[-1]
    block = next_power_of_2(size)
    if x.numel():
        add_rms_norm_kernel[(x.numel() // size,)](
            result, x, residual, weight, eps, SIZE=size, BLOCK=block, num_warps=count_warps(block), **FUSED
        )
    return result, residual
