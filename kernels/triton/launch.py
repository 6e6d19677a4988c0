"""Shared code of the public wrappers: checks of their tensors, and the sizes of a launch."""

from __future__ import annotations

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
# Options of every launch whose sums may be contracted; stated, because Triton's default changes in 3.10.
FUSED = {"enable_fp_fusion": True}
# ... and of those that must round as torch does.
EXACT = {"enable_fp_fusion": False}
# Threads of a row kernel by the padded length of its row, as warps of 32.
WARPS_OF_ROW = ((2048, 4), (8192, 8), (32768, 16))


def next_power_of_2(value: int) -> int:
    """Return the smallest power of two that is at least `value`, itself at least 1."""
    return 1 << max(0, value - 1).bit_length()


def count_warps(row_size: int) -> int:
    """Return how many warps a program needs that holds a whole row of this padded length."""
    return next((warps for limit, warps in WARPS_OF_ROW if row_size < limit), 32)


def check_float(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless the tensor holds one of the dtypes that the kernels take."""
    if tensor.dtype not in FLOATS:
        raise ValueError(f"{name} must be float32, float16 or bfloat16, not {tensor.dtype}")


def check_shape(name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    """Raise ValueError unless the tensor has this shape."""
    if tuple(tensor.shape) != expected:
        raise ValueError(f"{name} must have shape {expected}, not {tuple(tensor.shape)}")


def check_contiguous(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless the tensor is contiguous; kernels compute its offsets from its shape."""
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, not of strides {tensor.stride()}")


def check_rows(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless each entry of the first dimension is contiguous; their distance is free."""
    if not tensor[:1].is_contiguous():
        raise ValueError(f"{name} must be contiguous after its first dimension, not {tensor.stride()}")


def make_output(out: Tensor | None, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return the buffer that was handed in, once it is checked, or a new one."""
    if out is None:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    check_shape("out", out, shape)
    check_contiguous("out", out)
    if out.dtype != like.dtype:
        raise ValueError(f"out must be {like.dtype}, not {out.dtype}")
    return out
