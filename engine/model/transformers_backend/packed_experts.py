"""The experts function that transformers models call instead of their own.

transformers keeps the experts of a layer as 3-D parameters. Experts with a SiLU gate become ours, which the ops run in
one call. Others run on transformers' code, whose sums may depend on the batch in their last bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from engine.model.moe import Experts
from engine.model.moe_spec import MoESpec
from engine.model.sharding import ONE_RANK
from kernels.torch.elementwise import silu_mul

NAME = "troupe"
_ATTRIBUTE = "troupe_experts"
_TOLERANCE = 1e-5
# Set by transformers on modules that take an experts function.
_FLAGS = ("has_gate", "has_bias", "is_transposed")


class GroupedExperts(Experts):
    """The experts of one layer, run by the grouped product of the ops.

    Args:
        module: the module of transformers, whose parameters are taken over and removed; `is_grouped` accepts it.
    """

    def __init__(self, module: Any) -> None:
        gate_up, gate_up_bias = _take_stack(module, "gate_up_proj")
        down, down_bias = _take_stack(module, "down_proj")
        num_experts, hidden_size, inner_size = down.shape
        spec = MoESpec(1, num_experts=num_experts, inner_size=inner_size, has_bias=module.has_bias)
        super().__init__(spec, hidden_size, down.dtype, torch.device("meta"), ONE_RANK)
        self.gate_up, self.down = _freeze(gate_up), _freeze(down)
        if gate_up_bias is not None and down_bias is not None:
            self.gate_up_bias, self.down_bias = _freeze(gate_up_bias), _freeze(down_bias)

    def run(self, hidden: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts."""
        is_skipped = expert_ids >= self._spec.num_experts
        weights = weights.float().masked_fill(is_skipped, 0.0)
        return self(hidden, expert_ids.long().masked_fill(is_skipped, 0), weights)


def register() -> None:
    """Add the function to transformers' registry. Repeating it changes nothing."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, _forward)


def _forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    experts: GroupedExperts | None = getattr(module, _ATTRIBUTE, None)
    if experts is not None:
        return experts.run(hidden_states, top_k_index, top_k_weights)
    if hidden_states.is_meta:  # the model is traced for its shapes
        return torch.empty_like(hidden_states)
    result: Tensor = type(module).forward.__wrapped__(module, hidden_states, top_k_index, top_k_weights)
    return result


def pack_experts(model: nn.Module) -> set[str]:
    """Replace the 3-D parameters of every module that takes an experts function.

    Returns the classes of the experts that are left to transformers.
    """
    found = [each for each in model.modules() if all(hasattr(each, flag) for flag in _FLAGS)]
    left = set()
    for module in found:
        if is_grouped(module):
            setattr(module, _ATTRIBUTE, GroupedExperts(module))
        else:
            left.add(type(module).__name__)
    return left


def is_grouped(module: Any) -> bool:
    """Whether a module's experts compute silu(gate) * up, gate first, found by comparing results."""
    if not module.has_gate or getattr(module, "has_post_expert_norm", False):
        return False
    x = 4 * torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    return torch.allclose(module._apply_gate(x), silu_mul(x), rtol=_TOLERANCE, atol=_TOLERANCE)


def _freeze(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _take_stack(module: Any, name: str) -> tuple[Tensor, Tensor | None]:
    """Return the matrices [E, out, in] and biases [E, out] of all experts, and delete the module's parameters."""
    stacked = getattr(module, name).data
    biases = getattr(module, f"{name}_bias").data if module.has_bias else None
    delattr(module, name)
    if biases is not None:
        delattr(module, f"{name}_bias")
    return stacked.transpose(1, 2) if module.is_transposed else stacked, biases

