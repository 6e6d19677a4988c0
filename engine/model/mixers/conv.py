"""ShortConv: a gated convolution over the last tokens (LFM2)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.model.layer_spec import LayerSpec
from engine.model.linear import Linear, make_parameter
from engine.model.mixers.attention import StepInputs
from engine.model.weight_targets import Targets, WeightTarget, add_prefix
from kernels.ops import StateCache


class ShortConv(nn.Module):
    """Takes the place of attention in a decoder layer. Between its projections it computes in float32."""

    name = "conv"  # in the names of the checkpoint

    def __init__(self, layer: LayerSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        assert layer.state is not None, "the layer has a state"
        spec, size = layer.state, layer.hidden_size
        self.in_proj = Linear(size, 3 * size, spec.projection_bias, dtype=dtype, device=device)
        self.out_proj = Linear(size, size, spec.projection_bias, dtype=dtype, device=device)
        self.conv = make_parameter(spec.conv_width, size, dtype=torch.float32, device=device)
        self.conv_bias = make_parameter(size, dtype=torch.float32, device=device) if spec.conv_bias else None

    def forward(self, hidden: Tensor, cache: StateCache, step: StepInputs) -> Tensor:
        """Map [T, hidden_size] to [T, hidden_size], and advance the states of the step's requests."""
        segments = step.attn_metadata.states
        assert segments is not None, "the step has state slots"
        before, after, x = self.in_proj(hidden, torch.float32, step.adapters).chunk(3, dim=1)
        mixed = step.ops.run_conv(before * x, self.conv, self.conv_bias, cache[0], segments, has_silu=False)
        return self.out_proj((after * mixed).to(hidden.dtype), adapters=step.adapters)

    def weight_targets(self) -> Targets:
        targets: Targets = {"conv.weight": WeightTarget(self.conv.t().unsqueeze(1))}
        if self.conv_bias is not None:
            targets["conv.bias"] = WeightTarget(self.conv_bias)
        targets |= add_prefix("in_proj", self.in_proj.weight_targets())
        return targets | add_prefix("out_proj", self.out_proj.weight_targets())
