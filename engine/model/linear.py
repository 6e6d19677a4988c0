"""Linear layers, alone and fused: several checkpoint matrices stacked into one product."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Module):
    """y = x W^T + b, with uninitialised weights until the loader fills them.

    Args:
        in_features, out_features: sizes of x and y.
        parts: name and rows of each checkpoint matrix stacked into W, in order; default: one, called "".
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        parts: dict[str, int] | None = None,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self._parts = parts or {"": out_features}
        self.weight = make_parameter(out_features, in_features, dtype=dtype, device=device)
        self.bias = make_parameter(out_features, dtype=dtype, device=device) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def pack(self) -> None:
        """Change the layout of the loaded weights for speed; views taken before no longer belong to them."""
        self.weight = pack_weight(self.weight)

    def checkpoint_targets(self) -> dict[str, Tensor]:
        """Return the checkpoint tensors of this layer, `part.weight`, as views of the fused parameters."""
        targets = {}
        row = 0
        for part, rows in self._parts.items():
            prefix = f"{part}." if part else ""
            targets[f"{prefix}weight"] = self.weight[row : row + rows]
            if self.bias is not None:
                targets[f"{prefix}bias"] = self.bias[row : row + rows]
            row += rows
        return targets


def make_parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Make an uninitialised parameter without gradient."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


def pack_weight(weight: nn.Parameter) -> nn.Parameter:
    """Return the matrix of a product x W^T, same shape and values, laid out as its device likes it.

    Why: on CPU in float32 a column-major W makes products of 4 to 16 rows up to three times as fast.
    """
    if weight.device.type == "cpu" and weight.dtype == torch.float32:
        return nn.Parameter(weight.t().contiguous().t(), requires_grad=False)
    return weight
