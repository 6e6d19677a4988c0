"""Attention of one layer: projections, head norms, RoPE, the paged cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.model.attn_metadata import AttnMetadata
from engine.model.config import ModelConfig
from engine.model.linear import Linear, make_parameter
from kernels import Ops
from kernels.ops import KVCache, Plan


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What all layers of one step share, computed once."""

    ops: Ops
    attn_metadata: AttnMetadata
    plan: Plan
    cos: Tensor  # [T, 1, head_dim] float32
    sin: Tensor


class Attention(nn.Module):
    """Grouped-query attention over the paged KV cache.

    The key norm's and query norm's weights are kept as one row per head, so that one call norms both.
    """

    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self._num_heads = config.num_attention_heads
        self._num_kv_heads = config.num_key_value_heads
        self._head_dim = config.head_dim
        self._eps = config.rms_norm_eps
        self._scale = config.head_dim**-0.5
        self.sliding_window = config.sliding_window(layer)
        q_size, kv_size = self._num_heads * self._head_dim, self._num_kv_heads * self._head_dim
        self.qkv_proj = Linear(
            config.hidden_size,
            q_size + 2 * kv_size,
            config.qkv_bias,
            {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size},
            dtype=dtype,
            device=device,
        )
        self.o_proj = Linear(q_size, config.hidden_size, config.output_bias, dtype=dtype, device=device)
        self.qk_norm = None
        if config.qk_norm:
            self.qk_norm = make_parameter(
                self._num_heads + self._num_kv_heads, self._head_dim, dtype=dtype, device=device
            )

    def forward(self, hidden: Tensor, kv_cache: KVCache, step: StepInputs) -> Tensor:
        """Map [T, hidden_size] to [T, hidden_size], writing this step's keys and values into the cache."""
        num_tokens = hidden.shape[0]
        ops, metadata = step.ops, step.attn_metadata
        # All keys are written before any are read: a request may read a block that another one fills now.
        q = ops.norm_rope_store(
            self.qkv_proj(hidden).view(num_tokens, -1, self._head_dim),
            self.qk_norm,
            self._eps,
            step.cos,
            step.sin,
            *kv_cache,
            metadata.slot_mapping,
            self._num_heads,
        )
        attended = ops.paged_attention(
            q,
            *kv_cache,
            metadata.block_tables,
            metadata.query_start_loc,
            metadata.seq_lens,
            scale=self._scale,
            sliding_window=self.sliding_window,
            plan=step.plan,
        )
        return self.o_proj(attended.view(num_tokens, -1))

    def checkpoint_targets(self) -> dict[str, Tensor]:
        """Return the checkpoint tensors of this layer as views of its parameters."""
        targets = self.qkv_proj.checkpoint_targets()
        targets |= {f"o_proj.{name}": view for name, view in self.o_proj.checkpoint_targets().items()}
        if self.qk_norm is not None:
            # [H, D] views: the checkpoint's one row is copied to each head
            targets["q_norm.weight"] = self.qk_norm[: self._num_heads]
            targets["k_norm.weight"] = self.qk_norm[self._num_heads :]
        return targets
