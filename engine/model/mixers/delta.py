"""GatedDeltaNet: linear attention with a decaying state per head, which each token corrects by the delta rule.

Source: Yang et al., 2024 (Gated Delta Networks).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.model.layer_spec import LayerSpec
from engine.model.linear import Linear, make_parameter
from engine.model.mixers.attention import StepInputs
from engine.model.mixers.state_spec import StateSpec
from engine.model.weight_targets import Targets, WeightTarget, add_prefix
from kernels.ops import StateCache
from kernels.states import ScanWeights


class GatedDeltaNet(nn.Module):
    """Takes the place of attention in a decoder layer. Between its projections it computes in float32."""

    name = "linear_attn"  # in the names of the checkpoint

    def __init__(self, layer: LayerSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        assert layer.state is not None, "the layer has a state"
        self._spec = spec = layer.state
        self._eps = layer.norm_eps
        parts = {
            "in_proj_qkv": spec.num_channels, "in_proj_z": spec.value_width, "in_proj_b": spec.num_heads,
            "in_proj_a": spec.num_heads,
        }
        orders = {}
        if spec.has_fused_names:
            orders = {"in_proj_qkvz": _order_qkvz(spec), "in_proj_ba": _order_ba(spec)}
            parts = {name: len(order) for name, order in orders.items()}
        self.in_proj = Linear(
            layer.hidden_size, sum(parts.values()), False, parts, dtype=dtype, device=device, orders=orders
        )
        self.out_proj = Linear(spec.value_width, layer.hidden_size, False, dtype=dtype, device=device)

        def make(*shape: int) -> nn.Parameter:
            return make_parameter(*shape, dtype=torch.float32, device=device)

        self.conv = make(spec.conv_width, spec.num_channels)
        self.a_log, self.dt_bias = make(spec.num_heads), make(spec.num_heads)
        self.norm = make(spec.value_size)

    def forward(self, hidden: Tensor, cache: StateCache, step: StepInputs) -> Tensor:
        """Map [T, hidden_size] to [T, hidden_size], and advance the states of the step's requests."""
        ops, spec = step.ops, self._spec
        segments = step.attn_metadata.states
        assert segments is not None, "the step has state slots"
        projected = self.in_proj(hidden, torch.float32, step.adapters)
        sizes = (spec.num_channels, spec.value_width, spec.num_heads, spec.num_heads)
        mixed, gate, beta, dt = projected.split(sizes, dim=1)
        mixed = ops.run_conv(mixed, self.conv, None, cache[0], segments, has_silu=True)
        weights = ScanWeights(
            *(spec.num_heads, spec.num_groups, spec.key_size, spec.value_size),
            *(0, spec.key_width, 2 * spec.key_width),
            *(self.a_log, self.dt_bias, None),
        )
        out = ops.scan_states(mixed, dt, beta, weights, cache[1], segments)
        normed = ops.gated_norm(out, gate, self.norm, self._eps, hidden.dtype, is_gate_first=False)
        return self.out_proj(normed, adapters=step.adapters)

    def weight_targets(self) -> Targets:
        targets: Targets = {
            "conv1d.weight": WeightTarget(self.conv.t().unsqueeze(1)), "A_log": WeightTarget(self.a_log),
            "dt_bias": WeightTarget(self.dt_bias), "norm.weight": WeightTarget(self.norm),
        }
        return (
            targets | self.in_proj.weight_targets() | add_prefix("out_proj", self.out_proj.weight_targets())
        )


def _order_qkvz(spec: StateSpec) -> Tensor:
    """Return the rows of in_proj_qkvz, which has all rows of a group together, as all queries, keys, values, gates."""
    values = spec.value_width // spec.num_groups
    rows = torch.arange(spec.num_channels + spec.value_width).view(spec.num_groups, -1)
    return torch.cat(
        [part.flatten() for part in rows.split((spec.key_size, spec.key_size, values, values), dim=1)]
    )


def _order_ba(spec: StateSpec) -> Tensor:
    """Return the rows of in_proj_ba as all of beta, then all step sizes."""
    rows = torch.arange(2 * spec.num_heads).view(spec.num_groups, 2, -1)
    return rows.transpose(0, 1).flatten()
