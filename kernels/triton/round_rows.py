"""Activations rounded to 8 bits, one scale a token, for products of int8 and fp8."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.torch.linear import FP8, TINY
from kernels.triton.fp8 import encode_e4m3
from kernels.triton.launch import EXACT, check_contiguous, check_float, count_warps, next_power_of_2


@triton.jit
def round_rows_kernel(
    values_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    x_ptr: tl.tensor,
    greatest: tl.tensor,
    tiny: tl.tensor,
    SIZE: tl.constexpr,
    IS_FP8: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    x = tl.load(x_ptr + row * SIZE + columns, mask=mask, other=0.0).to(tl.float32)
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(x), 0), tiny), greatest)
    value = tl.div_rn(x, tl.zeros([BLOCK], tl.float32) + scale)
    if IS_FP8:
        code = encode_e4m3(value)
    else:
        # Beside 1.5 * 2 ** 23 the last bit of a float32 is worth 1: the sum is rounded to even.
        code = ((value + 12582912.0) - 12582912.0).to(tl.int8)
    tl.store(values_ptr + row * SIZE + columns, code, mask=mask)
    tl.store(scales_ptr + row, scale)


def round_rows(x: Tensor, greatest: float, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """As `kernels.torch.linear.round_rows`, in one launch."""
    check_float("x", x)
    check_contiguous("x", x)
    num_rows, size = x.shape
    values = torch.empty(x.shape, dtype=dtype, device=x.device)
    scales = torch.empty(num_rows, 1, dtype=torch.float32, device=x.device)
    block = next_power_of_2(size)
    if num_rows:
        round_rows_kernel[(num_rows,)](
            *(values.view(torch.uint8) if dtype == FP8 else values, scales, x, greatest, TINY),
            SIZE=size, IS_FP8=dtype == FP8, BLOCK=block, num_warps=count_warps(block), **EXACT,
        )  # fmt: skip
    return values, scales
