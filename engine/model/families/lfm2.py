"""LFM2: short convolutions in most layers, with or without experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.model.config_reader import ConfigReader
from engine.model.families.family import Family
from engine.model.families.layer_kinds import TRAINING_KEYS, place_states, read_conv_width, read_experts
from engine.model.layer_spec import LayerStyle
from engine.model.mixers.state_spec import StateSpec
from engine.model.moe_spec import MoENames

_NAMES = (
    *(("input_layernorm", "operator_norm"), ("post_attention_layernorm", "ffn_norm")),
    *(("q_norm", "q_layernorm"), ("k_norm", "k_layernorm"), ("self_attn.o_proj", "self_attn.out_proj")),
    *(("mlp.", "feed_forward."), ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")),
    ("model.norm", "model.embedding_norm"),
)
_DEFAULTS = {"num_key_value_heads": 8, "norm_eps": 1e-5, "tie_word_embeddings": True, "rope_theta": 1e6}
_INERT = TRAINING_KEYS | {
    *("block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_xavier_init"),
    *("block_use_swiglu", "conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads", "use_pos_enc"),
    *("tie_embedding", "theta", "full_attn_idxs", "block_multiple_of", "block_ffn_dim_multiplier"),
}


def _read_lfm2(reader: ConfigReader) -> dict[str, Any]:
    size = reader.integer("block_ff_dim", reader.integer("intermediate_size"))
    if reader.boolean("block_auto_adjust_ff_dim", True):
        size = int(reader.number("block_ffn_dim_multiplier", 1.0) * (2 * size // 3))
        multiple = reader.integer("block_multiple_of", 256)
        size = -(-size // multiple) * multiple
    return _read_conv_states(reader) | {"intermediate_size": size, "weight_renames": _NAMES}


def _read_lfm2_moe(reader: ConfigReader) -> dict[str, Any]:
    return _read_conv_states(reader) | _read_experts(reader) | {"weight_renames": _NAMES}


def _read_experts(reader: ConfigReader) -> dict[str, Any]:
    """Sigmoids, chosen with a correction; dense layers first."""
    spec = read_experts(
        reader,
        "moe_intermediate_size",
        score="sigmoid",
        is_normalized=reader.boolean("norm_topk_prob", True),
        scale=reader.number("routed_scaling_factor", 1.0),
        has_correction_bias=reader.boolean("use_expert_bias", True),
        names=MoENames(correction_bias="expert_bias", experts=("w1", "w3", "w2")),
    )
    num_dense = reader.integer("num_dense_layers", 2, minimum=0)
    num_layers = reader.integer("num_hidden_layers")
    return {"layer_moes": tuple(None if layer < num_dense else spec for layer in range(num_layers))}


def _read_conv_states(reader: ConfigReader) -> dict[str, Any]:
    """Short convolutions in all layers but those of attention."""
    num_layers = reader.integer("num_hidden_layers")
    types, full = reader.take("layer_types"), reader.take("full_attn_idxs")
    if types is None:
        types = ["full_attention" if full is None or layer in full else "conv" for layer in range(num_layers)]
    has_bias = reader.boolean("conv_bias", False)
    spec = StateSpec(
        "conv", read_conv_width(reader, "conv_L_cache", 3), num_conv_channels=reader.integer("hidden_size"),
        conv_bias=has_bias, projection_bias=has_bias,
    )
    return place_states(reader, types, ("conv",), spec)


_LFM2 = Family(
    "lfm2", LayerStyle(qk_norm="head"), qkv_bias=False, output_bias=False, eps_key="norm_eps",
    defaults=_DEFAULTS, inert=_INERT, state_layers=("conv",), read_fields=_read_lfm2,
)
FAMILIES: dict[str, Family] = {
    "Lfm2ForCausalLM": _LFM2,
    "Lfm2MoeForCausalLM": replace(_LFM2, model_type="lfm2_moe", read_fields=_read_lfm2_moe),
}
