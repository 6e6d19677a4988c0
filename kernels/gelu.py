"""GELU with the tanh approximation, alone and as the gated activation of a Gemma MLP."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def gelu(x: Tensor) -> Tensor:
    """Return gelu(x) of any shape, dtype of x. Source: Hendrycks and Gimpel, 2016."""
    return F.gelu(x, approximate="tanh")


def gelu_mul(gate_up: Tensor) -> Tensor:
    """Return gelu(gate) * up.

    Args:
        gate_up: [T, 2 * M], gate first; left as it is.

    Returns [T, M], dtype of gate_up.
    Source: Shazeer, 2020 (GEGLU).
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu(gate).mul_(up)
