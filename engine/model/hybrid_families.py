"""The families with layers that keep a state per request: Granite 4, Bamba, LFM2, Qwen3-Next, Qwen3.5 and 3.6."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.model.config_reader import ConfigReader
from engine.model.family import Family
from engine.model.layer_spec import LayerStyle
from engine.model.moe_config import TRAINING_KEYS, read_granite_moe, read_lfm2_moe, read_qwen2_moe
from engine.model.rope_config import RopeKeys
from engine.model.state_config import read_conv_states, read_delta_states, read_mamba_states


def read_granite(reader: ConfigReader) -> dict[str, Any]:
    return {
        "embedding_multiplier": reader.number("embedding_multiplier", 1.0),
        "residual_multiplier": reader.number("residual_multiplier", 1.0),
        "attention_scale": reader.number("attention_multiplier", 1.0),
        "logits_multiplier": 1.0 / reader.number("logits_scaling", 1.0),
    }


def _read_granite4(reader: ConfigReader) -> dict[str, Any]:
    fields, prefix = read_granite(reader), "mlp"
    types = reader.take("layer_types") or []
    if not types or any(kind in _MAMBA_LAYERS for kind in types):
        fields |= read_mamba_states(reader)
    if reader.integer("num_local_experts", 8, minimum=0):
        prefix = "block_sparse_moe.shared_mlp"
        fields |= read_granite_moe(reader, reader.integer("shared_intermediate_size"))
    names = (("gate_up_proj", "input_linear"), ("down_proj", "output_linear"))
    renames = tuple((f"{prefix}.{ours}", f"shared_mlp.{theirs}") for ours, theirs in names)
    return fields | {"weight_renames": renames}


_MAMBA_LAYERS = ("mamba", "linear_attention")
_MAMBA_INERT = frozenset(
    [
        *("time_step_limit", "init_method", "num_logits_to_keep", "z_loss_coefficient", "attn_rotary_emb"),
        *(f"mamba_{name}" for name in ("n_heads", "n_groups", "d_state", "d_head", "d_conv", "expand")),
        *(f"mamba_{name}" for name in ("chunk_size", "conv_bias", "proj_bias")),
    ]
)


def _read_bamba(reader: ConfigReader) -> dict[str, Any]:
    names = (
        ("mlp.", "feed_forward."),
        ("post_attention_layernorm", "pre_ff_layernorm"),
        ("model.norm", "model.final_layernorm"),
    )
    return read_mamba_states(reader) | {"weight_renames": names}


def _read_lfm2(reader: ConfigReader) -> dict[str, Any]:
    size = reader.integer("block_ff_dim", reader.integer("intermediate_size"))
    if reader.boolean("block_auto_adjust_ff_dim", True):
        size = int(reader.number("block_ffn_dim_multiplier", 1.0) * (2 * size // 3))
        multiple = reader.integer("block_multiple_of", 256)
        size = -(-size // multiple) * multiple
    return read_conv_states(reader) | {"intermediate_size": size, "weight_renames": _LFM2_NAMES}


def _read_lfm2_moe(reader: ConfigReader) -> dict[str, Any]:
    return read_conv_states(reader) | read_lfm2_moe(reader) | {"weight_renames": _LFM2_NAMES}


_LFM2_NAMES = (
    *(("input_layernorm", "operator_norm"), ("post_attention_layernorm", "ffn_norm")),
    *(("q_norm", "q_layernorm"), ("k_norm", "k_layernorm"), ("self_attn.o_proj", "self_attn.out_proj")),
    *(("mlp.", "feed_forward."), ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")),
    ("model.norm", "model.embedding_norm"),
)
_LFM2_DEFAULTS = {
    "num_key_value_heads": 8,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_theta": 1e6,
}
_LFM2_INERT = TRAINING_KEYS | {
    *("block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_xavier_init"),
    *("block_use_swiglu", "conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads", "use_pos_enc"),
    *("tie_embedding", "theta", "full_attn_idxs", "block_multiple_of", "block_ffn_dim_multiplier"),
}


# The last part of the checkpoint predicts several tokens.
_QWEN_INERT = TRAINING_KEYS | {
    *("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mlp_only_layers"),
}
_QWEN_DEFAULTS = {"head_dim": 256, "num_key_value_heads": 2, "partial_rotary_factor": 0.25}
_QWEN_STYLE = LayerStyle(norm_offset=1.0, qk_norm="head", has_output_gate=True)


def _read_qwen3_next(reader: ConfigReader) -> dict[str, Any]:
    states = read_delta_states(reader, has_fused_names=True)
    return states | read_qwen2_moe(reader) | {"ignored_weights": ("mtp.",)}


def _read_qwen3_5(reader: ConfigReader) -> dict[str, Any]:
    return read_delta_states(reader) | {"ignored_weights": ("mtp.",)}


def _read_qwen3_5_moe(reader: ConfigReader) -> dict[str, Any]:
    return _read_qwen3_5(reader) | read_qwen2_moe(reader)


_LFM2 = Family(
    "lfm2",
    LayerStyle(qk_norm="head"),
    qkv_bias=False,
    output_bias=False,
    eps_key="norm_eps",
    defaults=_LFM2_DEFAULTS,
    inert=_LFM2_INERT,
    state_layers=("conv",),
    read_fields=_read_lfm2,
)
HYBRID_FAMILIES: dict[str, Family] = {
    "GraniteMoeHybridForCausalLM": Family(
        "granitemoehybrid",
        LayerStyle(has_fused_names=True),
        inner_size_key="shared_intermediate_size",
        no_rope="without key",
        state_layers=_MAMBA_LAYERS,
        constants={"normalization_function": "rmsnorm"},
        inert=TRAINING_KEYS | _MAMBA_INERT | {"intermediate_size", "num_experts_per_tok"},
        read_fields=_read_granite4,
    ),
    "BambaForCausalLM": Family(
        "bamba",
        rope=RopeKeys(has_partial=True),
        mlp_bias="mlp_bias",
        defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
        inert=TRAINING_KEYS | _MAMBA_INERT,
        read_fields=_read_bamba,
    ),
    "Lfm2ForCausalLM": _LFM2,
    "Lfm2MoeForCausalLM": replace(_LFM2, model_type="lfm2_moe", read_fields=_read_lfm2_moe),
    "Qwen3NextForCausalLM": Family(
        "qwen3_next",
        _QWEN_STYLE,
        RopeKeys(has_partial=True),
        defaults=_QWEN_DEFAULTS | {"norm_topk_prob": True},
        inert=_QWEN_INERT,
        state_layers=("linear_attention",),
        read_fields=_read_qwen3_next,
    ),
    "Qwen3_5ForCausalLM": Family(
        "qwen3_5_text",
        _QWEN_STYLE,
        RopeKeys(has_partial=True, has_sections=True),
        defaults=_QWEN_DEFAULTS | {"num_key_value_heads": 4},
        constants={"attn_output_gate": True, "output_gate_type": "swish"},
        inert=_QWEN_INERT,
        state_layers=("linear_attention",),
        read_fields=_read_qwen3_5,
    ),
    "Qwen3_5MoeForCausalLM": Family(
        "qwen3_5_moe_text",
        _QWEN_STYLE,
        RopeKeys(has_partial=True, has_sections=True),
        inner_size_key="moe_intermediate_size",
        defaults=_QWEN_DEFAULTS | {"norm_topk_prob": True},
        constants={"attn_output_gate": True, "output_gate_type": "swish", "norm_topk_prob": True},
        inert=_QWEN_INERT | {"intermediate_size"},
        state_layers=("linear_attention",),
        read_fields=_read_qwen3_5_moe,
    ),
}
