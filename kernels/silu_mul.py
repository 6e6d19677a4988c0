"""The gated activation of a Llama MLP."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up.

    Args:
        gate_up: [T, 2 * M], gate first; left as it is.

    Returns [T, M], dtype of gate_up.
    Source: Shazeer, 2020 (SwiGLU).
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
