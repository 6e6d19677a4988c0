"""LayerSpec: the shape and arithmetic of one decoder layer."""

from __future__ import annotations

from dataclasses import dataclass

from engine.kv_cache_spec import KVCacheSpec
from engine.model.rope_config import RopeConfig


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Parameters from which a decoder layer is built and its KV cache is sized."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    rope: RopeConfig
    rms_norm_eps: float
    scale: float  # factor of the attention scores
    window: int | None  # tokens that a query attends to, its own included; None: all
    qk_norm: bool  # RMS norm of each query and key head before RoPE
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool

    @property
    def kv_spec(self) -> KVCacheSpec:
        """The layer's content in the KV cache."""
        return KVCacheSpec(self.num_kv_heads, self.head_size, self.window)
