"""Mamba2: a state space layer with one decay per head and token.

Source: Dao and Gu, 2024 (Mamba-2). Its keys and queries are called B and C there.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.model.layer_spec import LayerSpec
from engine.model.linear import Linear, make_parameter
from engine.model.mixers.attention import StepInputs
from engine.model.weight_targets import Targets, WeightTarget, add_prefix
from kernels.ops import StateCache
from kernels.states import ScanWeights


class Mamba2(nn.Module):
    """Takes the place of attention in a decoder layer. Between its projections it computes in float32."""

    name = "mamba"  # in the names of the checkpoint

    def __init__(self, layer: LayerSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        assert layer.state is not None, "the layer has a state"
        self._spec = spec = layer.state
        self._eps = layer.norm_eps
        size = spec.value_width + spec.num_channels + spec.num_heads
        self.in_proj = Linear(layer.hidden_size, size, spec.projection_bias, dtype=dtype, device=device)
        self.out_proj = Linear(
            spec.value_width, layer.hidden_size, spec.projection_bias, dtype=dtype, device=device
        )

        def make(*shape: int) -> nn.Parameter:
            return make_parameter(*shape, dtype=torch.float32, device=device)

        self.conv = make(spec.conv_width, spec.num_channels)
        self.conv_bias = make(spec.num_channels) if spec.conv_bias else None
        self.a_log, self.dt_bias, self.skip = (make(spec.num_heads) for _ in range(3))
        self.norm = make(spec.num_groups, spec.value_width // spec.num_groups)

    def forward(self, hidden: Tensor, cache: StateCache, step: StepInputs) -> Tensor:
        """Map [T, hidden_size] to [T, hidden_size], and advance the states of the step's requests."""
        ops, spec = step.ops, self._spec
        segments = step.attn_metadata.states
        assert segments is not None, "the step has state slots"
        projected = self.in_proj(hidden, torch.float32, step.adapters)
        gate, mixed, dt = projected.split((spec.value_width, spec.num_channels, spec.num_heads), dim=1)
        mixed = ops.run_conv(mixed, self.conv, self.conv_bias, cache[0], segments, has_silu=True)
        weights = ScanWeights(
            *(spec.num_heads, spec.num_groups, spec.key_size, spec.value_size),
            *(spec.value_width + spec.key_width, spec.value_width, 0),
            *(self.a_log, self.dt_bias, self.skip),
        )
        out = ops.scan_states(mixed, dt, None, weights, cache[1], segments)
        normed = ops.gated_norm(out, gate, self.norm, self._eps, hidden.dtype, is_gate_first=True)
        return self.out_proj(normed, adapters=step.adapters)

    def weight_targets(self) -> Targets:
        targets: Targets = {
            "conv1d.weight": WeightTarget(self.conv.t().unsqueeze(1)), "A_log": WeightTarget(self.a_log),
            "dt_bias": WeightTarget(self.dt_bias), "D": WeightTarget(self.skip),
            "norm.weight": WeightTarget(self.norm.view(-1)),
        }
        if self.conv_bias is not None:
            targets["conv1d.bias"] = WeightTarget(self.conv_bias)
        targets |= add_prefix("in_proj", self.in_proj.weight_targets())
        return targets | add_prefix("out_proj", self.out_proj.weight_targets())
