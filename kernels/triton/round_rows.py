"""Activations rounded to 8 bits, one scale a token or a group of its inputs, for products of int8 and fp8."""

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
    NUM_GROUPS: tl.constexpr,
    IS_FP8: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, BLOCK_GROUPS)
    columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = columns < SIZE
    x = tl.load(x_ptr + row * SIZE + columns, mask=mask, other=0.0).to(tl.float32)
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(x), 1), tiny), tl.zeros([BLOCK_GROUPS], tl.float32) + greatest)
    value = tl.div_rn(x, tl.zeros([BLOCK_GROUPS, GROUP], tl.float32) + scale[:, None])
    if IS_FP8:
        code = encode_e4m3(value)
    else:
        # Beside 1.5 * 2 ** 23 the last bit of a float32 is worth 1: the sum is rounded to even.
        code = ((value + 12582912.0) - 12582912.0).to(tl.int8)
    tl.store(values_ptr + row * SIZE + columns, code, mask=mask)
    tl.store(scales_ptr + row * NUM_GROUPS + groups, scale, mask=groups < NUM_GROUPS)


def round_rows(
    x: Tensor, greatest: float, dtype: torch.dtype = torch.int8, group_size: int = 0
) -> tuple[Tensor, Tensor]:
    """As `kernels.torch.linear.round_rows`, in one launch.

    Args:
        group_size: inputs that share a scale, a power of two; 0: all of a row. There is a scale for each group.
    """
    check_float("x", x)
    check_contiguous("x", x)
    num_rows, size = x.shape
    values = torch.empty(x.shape, dtype=dtype, device=x.device)
    group = group_size or next_power_of_2(size)
    num_groups = triton.cdiv(size, group)
    scales = torch.empty(num_rows, num_groups, dtype=torch.float32, device=x.device)
    block_groups = next_power_of_2(num_groups)
    if num_rows:
        round_rows_kernel[(num_rows,)](
            *(values.view(torch.uint8) if dtype == FP8 else values, scales, x, greatest, TINY),
            SIZE=size, NUM_GROUPS=num_groups, IS_FP8=dtype == FP8, BLOCK_GROUPS=block_groups, GROUP=group,
            num_warps=count_warps(block_groups * group), **EXACT,
        )  # fmt: skip
    return values, scales
