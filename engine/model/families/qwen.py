"""The Qwen families: 2, 2-VL, 2.5-VL, 3, 3-VL, those with experts, and those with gated delta nets (Next, 3.5, 3.6)."""

from __future__ import annotations

from typing import Any

from engine.model.config_reader import ConfigReader
from engine.model.families.family import Family
from engine.model.families.layer_kinds import (
    TRAINING_KEYS,
    in_sparse_layers,
    place_states,
    read_conv_width,
    read_experts,
)
from engine.model.layer_spec import LayerStyle
from engine.model.mixers.state_spec import StateSpec
from engine.model.moe_spec import MoENames
from engine.model.rope_config import RopeKeys

_HYBRID_INERT = TRAINING_KEYS | {"mamba_ssm_dtype", "mlp_only_layers"}
_HYBRID_DEFAULTS = {"head_dim": 256, "num_key_value_heads": 2, "partial_rotary_factor": 0.25}
_HYBRID_STYLE = LayerStyle(norm_offset=1.0, qk_norm="head", has_output_gate=True)


def _read_qwen2_moe(reader: ConfigReader) -> dict[str, Any]:
    """Qwen2-MoE: as Qwen3-MoE, with a gated shared expert."""
    spec = read_experts(
        reader, "moe_intermediate_size", is_normalized=reader.boolean("norm_topk_prob", False),
        shared_size=reader.integer("shared_expert_intermediate_size"), is_shared_gated=True,
        names=MoENames(shared="shared_expert"),
    )
    return in_sparse_layers(reader, spec)


def _read_qwen3_moe(reader: ConfigReader) -> dict[str, Any]:
    """Qwen3-MoE: as OLMoE, with dense layers at listed places or in regular distances."""
    is_normalized = reader.boolean("norm_topk_prob", False)
    spec = read_experts(reader, "moe_intermediate_size", is_normalized=is_normalized)
    return in_sparse_layers(reader, spec)


def _read_delta_states(reader: ConfigReader, *, has_fused_names: bool = False) -> dict[str, Any]:
    """Qwen3-Next and 3.5: gated delta nets, with full attention in every fourth layer if no layer types are given."""
    num_layers = reader.integer("num_hidden_layers")
    interval = reader.integer("full_attention_interval", 4)
    types = reader.take("layer_types") or [
        "linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(num_layers)
    ]
    spec = StateSpec(
        "delta",
        read_conv_width(reader, "linear_conv_kernel_dim", 4),
        num_heads=reader.integer("linear_num_value_heads", 32),
        num_groups=reader.integer("linear_num_key_heads", 16),
        key_size=reader.integer("linear_key_head_dim", 128),
        value_size=reader.integer("linear_value_head_dim", 128),
        has_fused_names=has_fused_names,
    )
    if spec.num_heads % spec.num_groups:
        raise reader.error(
            "linear_num_value_heads",
            spec.num_heads,
            f"must be a multiple of linear_num_key_heads={spec.num_groups}",
        )
    return place_states(reader, types, ("linear_attention",), spec)


def _read_qwen3_next(reader: ConfigReader) -> dict[str, Any]:
    states = _read_delta_states(reader, has_fused_names=True)
    return states | _read_qwen2_moe(reader) | _read_mtp(reader)


def _read_qwen3_5(reader: ConfigReader) -> dict[str, Any]:
    return _read_delta_states(reader) | _read_mtp(reader)


def _read_mtp(reader: ConfigReader) -> dict[str, Any]:
    """Read how many layers make drafts. Published configs of Qwen3-Next do not say it."""
    num_layers = reader.integer("mtp_num_hidden_layers", 1, minimum=0)
    has_own_embedding = reader.boolean("mtp_use_dedicated_embeddings", False)
    return {"num_mtp_layers": 0 if has_own_embedding else num_layers, "mtp_prefix": "mtp."}


def _read_qwen3_5_moe(reader: ConfigReader) -> dict[str, Any]:
    return _read_qwen3_5(reader) | _read_qwen2_moe(reader)


FAMILIES: dict[str, Family] = {
    "Qwen2ForCausalLM": Family(
        "qwen2", qkv_bias=True, output_bias=False, sliding_window="layers", defaults={"sliding_window": 4096},
    ),
    "Qwen3ForCausalLM": Family(
        "qwen3", LayerStyle(qk_norm="head"), sliding_window="layers",
        defaults={"sliding_window": 4096, "head_dim": 128},
    ),
    "Qwen2_5_VLForConditionalGeneration": Family(
        "qwen2_5_vl_text", rope=RopeKeys(has_sections=True), qkv_bias=True, output_bias=False,
        sliding_window="layers", defaults={"sliding_window": 4096, "rope_theta": 1e6},
        other_types=("qwen2_vl_text",),
    ),
    # The text part of Qwen3-VL.
    "Qwen3VLForConditionalGeneration": Family(
        "qwen3_vl_text", LayerStyle(qk_norm="head"), RopeKeys(has_sections=True),
        output_bias="attention_bias", defaults={"rope_theta": 5e5, "head_dim": 128},
    ),
    "Qwen2MoeForCausalLM": Family(
        "qwen2_moe", qkv_bias="qkv_bias", output_bias=False, sliding_window="layers",
        defaults={"qkv_bias": True, "sliding_window": 4096}, inert=TRAINING_KEYS, read_fields=_read_qwen2_moe,
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe", LayerStyle(qk_norm="head"), sliding_window="layers",
        constants={"use_sliding_window": False}, inert=TRAINING_KEYS, read_fields=_read_qwen3_moe,
    ),
    "Qwen3NextForCausalLM": Family(
        "qwen3_next", _HYBRID_STYLE, RopeKeys(has_partial=True),
        defaults=_HYBRID_DEFAULTS | {"norm_topk_prob": True}, inert=_HYBRID_INERT,
        state_layers=("linear_attention",), read_fields=_read_qwen3_next,
    ),
    "Qwen3_5ForCausalLM": Family(
        "qwen3_5_text", _HYBRID_STYLE, RopeKeys(has_partial=True, has_sections=True),
        defaults=_HYBRID_DEFAULTS | {"num_key_value_heads": 4},
        constants={"attn_output_gate": True, "output_gate_type": "swish"}, inert=_HYBRID_INERT,
        state_layers=("linear_attention",), read_fields=_read_qwen3_5,
    ),
    "Qwen3_5MoeForCausalLM": Family(
        "qwen3_5_moe_text",
        _HYBRID_STYLE,
        RopeKeys(has_partial=True, has_sections=True),
        inner_size_key="moe_intermediate_size",
        defaults=_HYBRID_DEFAULTS | {"norm_topk_prob": True},
        constants={"attn_output_gate": True, "output_gate_type": "swish", "norm_topk_prob": True},
        inert=_HYBRID_INERT | {"intermediate_size"},
        state_layers=("linear_attention",),
        read_fields=_read_qwen3_5_moe,
    ),
}
