"""The experts function that transformers models call instead of their own: each expert is a pair of packed matrices.

transformers keeps the experts of a layer as 3-D parameters. They become one Linear each, so that packing, quantization
and the move to native ops treat them as any other matrix, and a token's result does not depend on the batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from engine.model.linear import Linear

NAME = "troupe"
_ATTRIBUTE = "troupe_experts"
_FLAGS = (
    "has_gate",
    "has_bias",
    "is_transposed",
)  # set by transformers on modules that take an experts function


class PackedExperts(nn.Module):
    """The experts of one layer.

    Args:
        module: the module of transformers, whose parameters are taken over and removed.
    """

    def __init__(self, module: Any) -> None:
        super().__init__()
        self._has_gate = module.has_gate
        first = "gate_up_proj" if module.has_gate else "up_proj"
        self.ups = _take_matrices(module, first)
        self.downs = _take_matrices(module, "down_proj")

    def forward(self, module: Any, hidden: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts, in the order of their ids.

        Args:
            module: the module of transformers, for its activation.
            hidden: [T, hidden_size].
            expert_ids, weights: [T, top_k]; ids beyond the last expert are skipped.
        """
        out = torch.zeros_like(hidden)
        by_expert: dict[int, tuple[list[int], list[int]]] = {}
        for token, chosen in enumerate(expert_ids.tolist()):
            for place, expert in enumerate(chosen):
                pairs = by_expert.setdefault(expert, ([], []))
                pairs[0].append(token)
                pairs[1].append(place)
        for expert in sorted(by_expert):
            if expert >= len(self.ups):
                continue
            rows, places = (torch.tensor(each, device=hidden.device) for each in by_expert[expert])
            inner = self.ups[expert](hidden.index_select(0, rows))
            inner = module._apply_gate(inner) if self._has_gate else module.act_fn(inner)
            result = self.downs[expert](inner)
            if getattr(module, "has_post_expert_norm", False):
                result = module.post_expert_norm(result)
            result = result * weights[rows, places, None]
            out.index_add_(0, rows, result.to(out.dtype))
        return out


def register() -> None:
    """Add the function to transformers' registry. Repeating it changes nothing."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, _forward)


def _forward(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    experts: PackedExperts | None = getattr(module, _ATTRIBUTE, None)
    if experts is None:  # the model is traced for its shapes
        assert hidden_states.is_meta, "experts are packed before the model runs"
        return torch.empty_like(hidden_states)
    return experts(module, hidden_states, top_k_index, top_k_weights)


def pack_experts(model: nn.Module) -> None:
    """Replace the 3-D parameters of every module that takes an experts function."""
    for module in list(model.modules()):
        if all(hasattr(module, flag) for flag in _FLAGS):
            setattr(module, _ATTRIBUTE, PackedExperts(module))


def _take_matrices(module: Any, name: str) -> nn.ModuleList:
    """Return one Linear per expert, and delete the module's parameter."""
    stacked = getattr(module, name).data
    biases = getattr(module, f"{name}_bias").data if module.has_bias else None
    delattr(module, name)
    if biases is not None:
        delattr(module, f"{name}_bias")
    found = nn.ModuleList()
    for expert, matrix in enumerate(stacked):
        weight = (matrix.t() if module.is_transposed else matrix).contiguous()
        rows, columns = weight.shape
        linear = Linear(columns, rows, module.has_bias, dtype=weight.dtype, device=weight.device)
        targets = linear.weight_targets()
        targets["weight"].copy(weight)
        if biases is not None:
            targets["bias"].copy(biases[expert])
        found.append(linear)
    return found
