"""Replaces the RMS norms of a transformers model by one op each, where a numeric comparison shows that they agree."""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor, nn

from engine.model.paged_interface import StepContext
from kernels.torch.elementwise import rms_norm

_SUFFIX = "RMSNorm"  # of the class names in transformers
_NUM_ROWS, _TOLERANCE = 5, 1e-5


class NormOp(nn.Module):
    """An RMS norm on the ops of the step.

    Args:
        weight: factor of each element, its offset added.
    """

    def __init__(self, weight: Tensor, eps: float, context: StepContext) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._eps = eps
        self._context = context

    def forward(self, x: Tensor) -> Tensor:
        ops = self._context.ops
        assert ops is not None, "norms run within a step"
        return ops.rms_norm(x, self.weight, self._eps)


def swap_norms(model: nn.Module, context: StepContext) -> None:
    """Replace every RMS norm over the last dimension whose weight counts as w or as 1 + w."""
    offsets: dict[tuple[type, float], float | None] = {}
    for name, module in list(model.named_modules()):
        eps = _find_eps(module)
        if eps is None:
            continue
        key = type(module), eps
        if key not in offsets:
            offsets[key] = _find_offset(module, eps)
        offset, weight = offsets[key], module.weight
        if offset is not None:
            assert isinstance(weight, Tensor), "checked by _find_eps"
            model.set_submodule(name, NormOp(weight.data + offset, eps, context))


def _find_eps(module: nn.Module) -> float | None:
    """Return the epsilon of a module that looks like an RMS norm with one weight; None for other modules."""
    weight = module._parameters.get("weight")
    is_plain = len(module._parameters) == 1 and not module._buffers and not module._modules
    if not type(module).__name__.endswith(_SUFFIX) or not is_plain or weight is None or weight.dim() != 1:
        return None
    found = [getattr(module, name, None) for name in ("variance_epsilon", "eps")]
    return next((value for value in found if isinstance(value, float)), None)


def _find_offset(module: nn.Module, eps: float) -> float | None:
    """Return what the module adds to its weight, found by comparing results; None if it computes something else."""
    size = module._parameters["weight"].shape[0]  # type: ignore[union-attr]
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(size, generator=generator)
    # Small rows show where epsilon is added.
    x = torch.randn(_NUM_ROWS, size, generator=generator) * torch.tensor(
        [[1e-3], [1e-2], [0.1], [1.0], [100.0]]
    )
    twin = copy(module)
    twin.__dict__["_parameters"] = {"weight": weight}
    result = twin(x[None])[0]
    for offset in (0.0, 1.0):
        if torch.allclose(result, rms_norm(x, weight + offset, eps), rtol=_TOLERANCE, atol=_TOLERANCE):
            return offset
    return None
