"""DecoderLayer: one layer of a decoder-only transformer; its LayerSpec selects the parts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.model.layer_spec import LayerSpec
from engine.model.mixers.attention import Attention, StepInputs
from engine.model.mixers.conv import ShortConv
from engine.model.mixers.delta import GatedDeltaNet
from engine.model.mixers.latent import LatentAttention
from engine.model.mixers.mamba import Mamba2
from engine.model.mlp import MLP
from engine.model.moe import MoE
from engine.model.norm import Norm
from engine.model.sharding import Sharding
from engine.model.weight_targets import Targets, add_prefix
from kernels import Ops
from kernels.ops import KVCache

STATE_LAYERS: dict[str, type[GatedDeltaNet | Mamba2 | ShortConv]] = {
    "delta": GatedDeltaNet, "mamba": Mamba2, "conv": ShortConv,
}


class DecoderLayer(nn.Module):
    """Attention, or a layer with a state, and MLP with their norms.

    The next layer adds the MLP's output to the residual stream.

    Args:
        cache_index: index of the layer's cache in those of a step.
    """

    def __init__(
        self, spec: LayerSpec, rope_index: int, group: int, cache_index: int, dtype: torch.dtype,
        device: torch.device, sharding: Sharding,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.cache_index = cache_index
        placement = spec.style.placement

        def make_norm() -> Norm:
            return Norm(spec.hidden_size, spec.style, spec.norm_eps, dtype, device)

        self.input_norm = make_norm() if placement != "post" else None
        self.attention: Attention | LatentAttention | GatedDeltaNet | Mamba2 | ShortConv
        if spec.state is None:
            make_attention = Attention if spec.latent is None else LatentAttention
            self.attention = make_attention(spec, rope_index, dtype, device, sharding, group)
        else:
            self.attention = STATE_LAYERS[spec.state.kind](spec, dtype, device)
        self.attention_norm = make_norm() if placement in ("post", "sandwich") else None
        self.mlp_input_norm = make_norm() if placement in ("pre", "sandwich") else None
        make_mlp = MLP if spec.moe is None else MoE
        self.mlp = make_mlp(spec, dtype, device, sharding)
        self.mlp_norm = make_norm() if placement in ("post", "sandwich") else None

    def forward(
        self, hidden: Tensor | None, residual: Tensor, kv_cache: KVCache, step: StepInputs
    ) -> tuple[Tensor, Tensor]:
        """Run the layer.

        Args:
            hidden: [T, D], the previous layer's output, not yet added to the residual stream; None in the first layer.
            residual: [T, D], overwritten.

        Returns (hidden, residual) for the next layer.
        """
        ops = step.ops
        normed = add_norm(hidden, residual, self.input_norm, ops)
        hidden = self.attention(normed, kv_cache, step)
        if self.spec.style.placement == "parallel":
            return hidden.add_(self.mlp(normed, ops, step.adapters)), residual
        hidden = self._finish(hidden, self.attention_norm, ops)
        normed = add_norm(hidden, residual, self.mlp_input_norm, ops)
        return self._finish(self.mlp(normed, ops, step.adapters), self.mlp_norm, ops), residual

    def _finish(self, hidden: Tensor, norm: Norm | None, ops: Ops) -> Tensor:
        """Return what attention or MLP adds to the residual stream."""
        if norm is not None:
            hidden = norm(hidden, ops)
        return hidden if self.spec.residual_multiplier == 1 else hidden.mul_(self.spec.residual_multiplier)

    def weight_targets(self) -> Targets:
        is_sandwich = self.spec.style.placement == "sandwich"
        norms = {
            "input_layernorm": self.input_norm,
            "post_attention_layernorm": self.attention_norm or self.mlp_input_norm,
            "pre_feedforward_layernorm": self.mlp_input_norm if is_sandwich else None,
            "post_feedforward_layernorm": self.mlp_norm,
        }
        targets = add_prefix(self.attention.name, self.attention.weight_targets())
        targets |= add_prefix(self.mlp.name, self.mlp.weight_targets())
        for name, norm in norms.items():
            if norm is not None:
                targets |= add_prefix(name, norm.weight_targets())
        return targets


def add_norm(hidden: Tensor | None, residual: Tensor, norm: Norm | None, ops: Ops) -> Tensor:
    """Add hidden to the residual stream, which is overwritten, and return the norm of the sum, if there is one."""
    if norm is None:
        return residual if hidden is None else residual.add_(hidden)
    return norm(residual, ops) if hidden is None else norm.add(hidden, residual, ops)
