"""Attention of one layer: projections, head norms, RoPE, paged attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.model.attn_metadata import AttnMetadata
from engine.model.layer_spec import LayerSpec
from engine.model.linear import Linear, make_parameter
from engine.model.weight_targets import Targets, WeightTarget, add_prefix
from kernels import Ops
from kernels.ops import KVCache, Plan


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Inputs of a step that all layers share."""

    ops: Ops
    attn_metadata: AttnMetadata
    plan: Plan
    cos: Tensor  # [T, 1, head_dim] float32
    sin: Tensor


class Attention(nn.Module):
    """Grouped-query attention over the paged KV cache.

    The weights of query and key norm are stored as one row per head, so that one call computes both.
    """

    def __init__(self, spec: LayerSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self._spec = spec
        q_size, kv_size = spec.num_heads * spec.head_size, spec.num_kv_heads * spec.head_size
        self.qkv_proj = Linear(
            spec.hidden_size,
            q_size + 2 * kv_size,
            spec.qkv_bias,
            {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size},
            dtype=dtype,
            device=device,
        )
        self.o_proj = Linear(q_size, spec.hidden_size, spec.output_bias, dtype=dtype, device=device)
        self.qk_norm = None
        if spec.qk_norm:
            num_heads = spec.num_heads + spec.num_kv_heads
            self.qk_norm = make_parameter(num_heads, spec.head_size, dtype=dtype, device=device)

    def forward(self, hidden: Tensor, kv_cache: KVCache, step: StepInputs) -> Tensor:
        """Map [T, hidden_size] to [T, hidden_size], and write the step's keys and values into the cache."""
        num_tokens = hidden.shape[0]
        ops, metadata, spec = step.ops, step.attn_metadata, self._spec
        # All keys are written before any is read, because a request may read a block that another one fills now.
        q = ops.norm_rope_store(
            self.qkv_proj(hidden).view(num_tokens, -1, spec.head_size),
            self.qk_norm,
            spec.rms_norm_eps,
            step.cos,
            step.sin,
            *kv_cache,
            metadata.slot_mapping,
            spec.num_heads,
        )
        attended = ops.paged_attention(
            q,
            *kv_cache,
            metadata.block_tables,
            metadata.query_start_loc,
            metadata.seq_lens,
            scale=spec.scale,
            sliding_window=spec.window,
            plan=step.plan,
        )
        return self.o_proj(attended.view(num_tokens, -1))

    def weight_targets(self) -> Targets:
        """Return the memory for each checkpoint tensor of the layer."""
        targets = self.qkv_proj.weight_targets() | add_prefix("o_proj", self.o_proj.weight_targets())
        if self.qk_norm is not None:
            num_heads = self._spec.num_heads
            targets["q_norm.weight"] = WeightTarget(self.qk_norm[:num_heads], is_repeated=True)
            targets["k_norm.weight"] = WeightTarget(self.qk_norm[num_heads:], is_repeated=True)
        return targets
