"""Norm: the norms of a decoder layer, alone and after the sum with the residual stream."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.model.layer_spec import LayerStyle
from engine.model.linear import make_parameter
from engine.model.weight_targets import Targets, WeightTarget
from kernels import Ops


class Norm(nn.Module):
    """RMS norm or layer norm of vectors of `size` numbers."""

    def __init__(
        self, size: int, style: LayerStyle, eps: float, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self._style = style
        self._eps = eps
        self.norm = make_parameter(size, dtype=dtype, device=device)
        self.bias = make_parameter(size, dtype=dtype, device=device) if style.norm_bias else None

    def forward(self, x: Tensor, ops: Ops) -> Tensor:
        if self._style.norm == "layer":
            return F.layer_norm(x, x.shape[-1:], self.norm, self.bias, self._eps)
        return ops.rms_norm(x, self.norm, self._eps)

    def add(self, hidden: Tensor, residual: Tensor, ops: Ops) -> Tensor:
        """Add hidden to the residual stream, which is overwritten, and return the norm of the sum."""
        if self._style.norm == "layer":
            return self(residual.add_(hidden), ops)
        return ops.add_rms_norm(hidden, residual, self.norm, self._eps)[0]

    def weight_targets(self) -> Targets:
        targets: Targets = {"weight": WeightTarget(self.norm, offset=self._style.norm_offset)}
        if self.bias is not None:
            targets["bias"] = WeightTarget(self.bias)
        return targets
