"""LayerSpec: the shape and arithmetic of one decoder layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.kv_cache_spec import KVCacheSpec
from engine.model.mixers.latent_spec import LatentSpec
from engine.model.mixers.state_spec import StateSpec
from engine.model.moe_spec import MoESpec
from engine.model.rope_config import RopeConfig

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class LayerStyle:
    """How the layers of a model compute, beyond their shapes; the defaults are Llama's."""

    norm: Literal["rms", "layer"] = "rms"
    norm_bias: bool = False
    norm_offset: float = 0.0  # added to the checkpoint's norm weights
    # Where the norms are: before attention and MLP, after them, both, or one before both, which then run side by side.
    placement: Literal["pre", "post", "sandwich", "parallel"] = "pre"
    # RMS norm of queries and keys before RoPE: none, of each head, or of all heads together.
    qk_norm: Literal["none", "head", "full"] = "none"
    activation: Activation = "silu"
    is_gated: bool = True  # whether the MLP multiplies the activated gate with a second projection
    has_sinks: bool = False  # a learned score per head that takes part in the softmax and has no value
    rope_pairs: Literal["halves", "interleaved"] = "halves"  # which numbers of a head rotate together
    has_output_gate: bool = False  # a sigmoid, computed beside the queries, scales what attention returns
    has_fused_qkv: bool = False  # the checkpoint stores one qkv_proj
    has_fused_names: bool = False  # the checkpoint stores one gate_up_proj


LLAMA_STYLE = LayerStyle()


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Parameters from which a decoder layer is built and its KV cache is sized."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    rope: RopeConfig | None  # None: no positions
    norm_eps: float
    scale: float  # factor of the attention scores
    window: int | None  # tokens that a query attends to, its own included; None: all
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    soft_cap: float | None = None  # bound of the attention scores
    residual_multiplier: float = 1.0  # of what attention and MLP add to the residual stream
    style: LayerStyle = LLAMA_STYLE
    moe: MoESpec | None = None  # in place of the MLP
    state: StateSpec | None = None  # in place of attention
    latent: LatentSpec | None = None  # its keys are those of one head of `head_size`, and values are a part of them

    @property
    def kv_spec(self) -> KVCacheSpec:
        """The layer's content in the KV cache."""
        return KVCacheSpec(self.num_kv_heads, self.head_size, self.window, has_values=self.latent is None)

    @property
    def rope_size(self) -> int:
        """Numbers of a head that the tables of RoPE are made for."""
        return self.head_size if self.latent is None else self.latent.rope_size
