"""Root mean square norm, alone and with the residual sum before it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each vector of the last dimension to unit root mean square, then by `weight`.

    Args:
        x: [..., D].
        weight: [D], or [N, D] for one weight per head of x [..., N, D].
        eps: added to the mean square.

    Returns the shape and dtype of x; the arithmetic is float32.
    Source: Zhang and Sennrich, 2019.
    """
    if x.is_cuda:
        return F.rms_norm(x, x.shape[-1:], None, eps) * weight
    # On CPU torch runs its own rms_norm as a dozen small ops; these are half as many.
    norm = torch.linalg.vector_norm(x, 2, -1, True, dtype=torch.float32)
    scale = torch.addcmul(norm.new_full((), eps), norm, norm, value=1.0 / x.shape[-1]).rsqrt_()
    return (x * scale).mul_(weight).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add x to the residual stream, then norm the sum.

    Args:
        x: [T, D], left as it is.
        residual: [T, D], overwritten with the sum.
        weight: [D].

    Returns (normed, residual), both [T, D]; `residual` is the tensor passed in.
    """
    residual.add_(x)
    return rms_norm(residual, weight, eps), residual
