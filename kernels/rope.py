"""Rotary position embedding of queries and keys."""

from __future__ import annotations

from torch import Tensor


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each head of x by the angles of its token.

    Args:
        x: [T, N, D], queries and keys side by side in N.
        cos: [T, 1, D] float32, both halves alike.
        sin: [T, 1, D] float32, the first half negated, so that the rotation is one multiply-add over
            swapped halves.

    Returns [T, N, D], dtype of x; the arithmetic is float32.
    Source: Su et al., 2021 (RoFormer), in the half-split layout of Hugging Face checkpoints.
    """
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return (x * cos).addcmul_(swapped, sin).to(x.dtype)
