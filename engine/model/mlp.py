"""MLP: the feed-forward part of a decoder layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.model.adapters import StepAdapters
from engine.model.layer_spec import LayerSpec
from engine.model.linear import Linear
from engine.model.row_linear import make_row_linear
from engine.model.shard import Shard
from engine.model.sharding import ONE_RANK, Sharding
from engine.model.weight_targets import Targets, add_prefix
from kernels import Ops


class MLP(nn.Module):
    """Feed-forward part of a layer, with or without a gate."""

    name = "mlp"  # in the names of the checkpoint

    def __init__(
        self, spec: LayerSpec, dtype: torch.dtype, device: torch.device, sharding: Sharding = ONE_RANK
    ) -> None:
        super().__init__()
        hidden, whole, style = spec.hidden_size, spec.intermediate_size, spec.style
        inner = sharding.count(whole)
        self._style = style
        parts = {"gate_proj": inner, "up_proj": inner} if style.is_gated else {"c_fc": inner}
        if style.has_fused_names:
            parts = {"gate_up_proj": 2 * inner}
        self.gate_up_proj = Linear(
            hidden, sum(parts.values()), spec.mlp_bias, parts, dtype=dtype, device=device,
            shards=_shard_rows(tuple(parts), whole, sharding) if sharding.size > 1 else None,
        )
        self.down_proj = make_row_linear(whole, hidden, spec.mlp_bias, sharding, dtype, device, int4_as="int6")

    def forward(self, hidden: Tensor, ops: Ops, adapters: StepAdapters | None = None) -> Tensor:
        is_gated_silu = self._style.activation == "silu" and self._style.is_gated
        if is_gated_silu and adapters is None and ops.gated_linear is not None:
            activated = ops.gated_linear(hidden, self.gate_up_proj.packed, self.gate_up_proj.bias)
            return self.down_proj(activated)
        inner = self.gate_up_proj(hidden, adapters=adapters)
        if self._style.activation == "silu":
            activated = ops.silu_mul(inner)
        else:
            activated = ops.gelu_mul(inner) if self._style.is_gated else ops.gelu(inner)
        return self.down_proj(activated, adapters=adapters)

    def weight_targets(self) -> Targets:
        down = "down_proj" if self._style.is_gated else "c_proj"
        return self.gate_up_proj.weight_targets() | add_prefix(down, self.down_proj.weight_targets())


def _shard_rows(names: tuple[str, ...], inner: int, sharding: Sharding) -> dict[str, Shard]:
    """Return the rank's rows of gate and up, separate or in one."""
    start, length = sharding.part(inner)
    if names == ("gate_up_proj",):
        return {"gate_up_proj": Shard(0, 2 * inner, ((start, length), (inner + start, length)))}
    return dict.fromkeys(names, Shard(0, inner, ((start, length),)))
