"""The experts function that transformers models call instead of their own.

transformers keeps the experts of a layer as 3-D parameters. Experts with a SiLU gate become ours, which the ops run in
one call. Others become one Linear per matrix, so that packing, quantization and the move to native ops treat them as
any other matrix. In both ways a token's result does not depend on the batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from engine.model.linear import Linear
from engine.model.moe import Experts
from engine.model.moe_spec import MoESpec
from engine.model.sharding import ONE_RANK
from kernels.torch.elementwise import silu_mul

NAME = "troupe"
_ATTRIBUTE = "troupe_experts"
_TOLERANCE = 1e-5
_FLAGS = (
    "has_gate",
    "has_bias",
    "is_transposed",
)  # set by transformers on modules that take an experts function


class GroupedExperts(Experts):
    """The experts of one layer, run by the grouped product of the ops.

    Args:
        module: as for PackedExperts; `is_grouped` accepts it.
    """

    def __init__(self, module: Any) -> None:
        gate_up, gate_up_bias = _take_stack(module, "gate_up_proj")
        down, down_bias = _take_stack(module, "down_proj")
        num_experts, hidden_size, inner_size = down.shape
        spec = MoESpec(num_experts, 1, inner_size, has_bias=module.has_bias)
        super().__init__(spec, hidden_size, down.dtype, torch.device("meta"), ONE_RANK)
        self.gate_up, self.down = _freeze(gate_up), _freeze(down)
        if gate_up_bias is not None and down_bias is not None:
            self.gate_up_bias, self.down_bias = _freeze(gate_up_bias), _freeze(down_bias)

    def run(self, module: Any, hidden: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """As `PackedExperts.run`."""
        is_skipped = expert_ids >= self._spec.num_experts
        weights = weights.float().masked_fill(is_skipped, 0.0)
        return self(hidden, expert_ids.long().masked_fill(is_skipped, 0), weights)


class PackedExperts(nn.Module):
    """The experts of one layer, one after the other.

    Args:
        module: the module of transformers, whose parameters are taken over and removed.
    """

    def __init__(self, module: Any) -> None:
        super().__init__()
        self._has_gate = module.has_gate
        first = "gate_up_proj" if module.has_gate else "up_proj"
        self.ups = _take_matrices(module, first)
        self.downs = _take_matrices(module, "down_proj")

    def run(self, module: Any, hidden: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts, in the order of their ids.

        Args:
            module: the module of transformers, for its activation.
            hidden: [T, hidden_size].
            expert_ids, weights: [T, top_k]; ids beyond the last expert are skipped.
        """
        out = torch.zeros_like(hidden)
        for expert in expert_ids.unique().tolist():
            if expert >= len(self.ups):
                continue
            rows, places = (expert_ids == expert).nonzero(as_tuple=True)
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
    experts: GroupedExperts | PackedExperts | None = getattr(module, _ATTRIBUTE, None)
    if experts is None:  # the model is traced for its shapes
        assert hidden_states.is_meta, "experts are packed before the model runs"
        return torch.empty_like(hidden_states)
    return experts.run(module, hidden_states, top_k_index, top_k_weights)


def pack_experts(model: nn.Module) -> None:
    """Replace the 3-D parameters of every module that takes an experts function."""
    for module in list(model.modules()):
        if all(hasattr(module, flag) for flag in _FLAGS):
            experts = GroupedExperts(module) if is_grouped(module) else PackedExperts(module)
            setattr(module, _ATTRIBUTE, experts)


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


def _take_matrices(module: Any, name: str) -> nn.ModuleList:
    """Return one Linear per expert, and delete the module's parameters."""
    stacked, biases = _take_stack(module, name)
    found = nn.ModuleList()
    for expert, matrix in enumerate(stacked):
        weight = matrix.contiguous()
        rows, columns = weight.shape
        linear = Linear(columns, rows, module.has_bias, dtype=weight.dtype, device=weight.device)
        targets = linear.weight_targets()
        targets["weight"].copy(weight)
        if biases is not None:
            targets["bias"].copy(biases[expert])
        found.append(linear)
    return found
