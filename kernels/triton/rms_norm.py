"""Root mean square norm of rows, one program a row."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import FUSED, check_float, count_warps, make_output, next_power_of_2


@triton.jit
def rms_norm_kernel(
    out_ptr: tl.tensor,
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    NUM_WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    x = tl.load(x_ptr + row * SIZE + columns, mask=mask, other=0.0).to(tl.float32)
    weight_row = weight_ptr + (row % NUM_WEIGHTS) * SIZE
    weight = tl.load(weight_row + columns, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps)
    normed = x * scale * weight
    tl.store(out_ptr + row * SIZE + columns, normed.to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """As `kernels.torch.elementwise.rms_norm`, rounded once; `out` is written and returned when given."""
    check_float("x", x)
    size = x.shape[-1]
    num_weights = weight.shape[0] if weight.dim() == 2 else 1
    if weight.shape[-1] != size or (num_weights > 1 and (x.dim() < 2 or x.shape[-2] != num_weights)):
        raise ValueError(f"weight {tuple(weight.shape)} does not fit x {tuple(x.shape)}")
    x = x.contiguous()
    result = make_output(out, tuple(x.shape), x)
    block = next_power_of_2(size)
    grid = (x.numel() // size,)
    if grid[0]:
        rms_norm_kernel[grid](
            result,
            x,
            weight.contiguous(),
            eps,
            SIZE=size,
            NUM_WEIGHTS=num_weights,
            BLOCK=block,
            num_warps=count_warps(block),
            **FUSED,
        )
    return result
