"""The supported model families and their differences."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.model.config_reader import ConfigReader
from engine.model.family import Family
from engine.model.hybrid_families import HYBRID_FAMILIES, read_granite
from engine.model.layer_spec import LayerStyle
from engine.model.moe_config import (
    TRAINING_KEYS,
    read_glm4_moe,
    read_gpt_oss,
    read_granite_moe,
    read_minimax_m2,
    read_mixtral,
    read_olmoe,
    read_qwen2_moe,
    read_qwen3_moe,
)
from engine.model.rope_config import RopeKeys


def _read_gemma2(reader: ConfigReader) -> dict[str, Any]:
    return _read_gemma3(reader) | {"soft_cap": reader.optional_number("attn_logit_softcapping")}


def _read_gemma3(reader: ConfigReader) -> dict[str, Any]:
    return {
        "embedding_multiplier": reader.integer("hidden_size") ** 0.5,
        "attention_scale": reader.number("query_pre_attn_scalar", 256) ** -0.5,
        "logits_cap": reader.optional_number("final_logit_softcapping"),
    }


def _read_cohere2(reader: ConfigReader) -> dict[str, Any]:
    return {"logits_multiplier": reader.number("logit_scale", 0.0625)}


_GEMMA_STYLE = LayerStyle(placement="sandwich", norm_offset=1.0, activation="gelu_tanh")
_GEMMA_DEFAULTS = {
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "tie_word_embeddings": True,
    "sliding_window": 4096,
}

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", mlp_bias="mlp_bias"),
    "MistralForCausalLM": Family(
        "mistral",
        qkv_bias=False,
        output_bias=False,
        sliding_window="all",
        defaults={"sliding_window": 4096, "num_key_value_heads": 8},
    ),
    "Qwen2ForCausalLM": Family(
        "qwen2",
        qkv_bias=True,
        output_bias=False,
        sliding_window="layers",
        defaults={"sliding_window": 4096},
    ),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        LayerStyle(qk_norm="head"),
        sliding_window="layers",
        defaults={"sliding_window": 4096, "head_dim": 128},
    ),
    "Qwen2_5_VLForConditionalGeneration": Family(
        "qwen2_5_vl_text",
        rope=RopeKeys(has_sections=True),
        qkv_bias=True,
        output_bias=False,
        sliding_window="layers",
        defaults={"sliding_window": 4096, "rope_theta": 1e6},
    ),
    # The text part of Qwen3-VL.
    "Qwen3VLForConditionalGeneration": Family(
        "qwen3_vl_text",
        LayerStyle(qk_norm="head"),
        RopeKeys(has_sections=True),
        output_bias="attention_bias",
        defaults={"rope_theta": 5e5, "head_dim": 128},
    ),
    "SmolLM3ForCausalLM": Family(
        "smollm3",
        mlp_bias="mlp_bias",
        sliding_window="layers",
        no_rope="listed",
        defaults={"tie_word_embeddings": True, "rope_theta": 2e6, "max_window_layers": 0},
    ),
    "GraniteForCausalLM": Family("granite", mlp_bias="mlp_bias", read_fields=read_granite),
    "Phi3ForCausalLM": Family(
        "phi3",
        LayerStyle(has_fused_qkv=True, has_fused_names=True),
        RopeKeys(has_partial=True, old_longrope_types=("su", "yarn")),
        qkv_bias=False,
        output_bias=False,
        sliding_window="all",
        constants={"full_attn_mod": 1, "interpolate_factor": 1},
        inert=frozenset(["original_max_position_embeddings"]),
    ),
    "Ministral3ForCausalLM": Family(
        "ministral3",
        rope=RopeKeys(has_query_scaling=True),
        qkv_bias=False,
        output_bias=False,
        sliding_window="all",
        defaults={"num_key_value_heads": 8, "head_dim": 128},
    ),
    "Olmo2ForCausalLM": Family("olmo2", LayerStyle(placement="post", qk_norm="full")),
    "Olmo3ForCausalLM": Family(
        "olmo3",
        LayerStyle(placement="post", qk_norm="full"),
        RopeKeys(has_layer_types=True),
        sliding_window="types",
        defaults={"rope_theta": 5e5, "sliding_window": 4096, "sliding_window_pattern": 4},
    ),
    "Exaone4ForCausalLM": Family(
        "exaone4",
        LayerStyle(placement="post", qk_norm="head"),
        qkv_bias=False,
        output_bias=False,
        sliding_window="types",
        no_rope="full if windowed",
        defaults={"sliding_window": 4096, "sliding_window_pattern": 4, "num_key_value_heads": 32},
    ),
    "Gemma2ForCausalLM": Family(
        "gemma2",
        _GEMMA_STYLE,
        sliding_window="types",
        activation_key="hidden_activation",
        defaults=_GEMMA_DEFAULTS
        | {
            "sliding_window_pattern": 2,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "num_key_value_heads": 4,
        },
        inert=frozenset(["hidden_act"]),
        read_fields=_read_gemma2,
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3_text",
        replace(_GEMMA_STYLE, qk_norm="head"),
        RopeKeys(has_layer_types=True),
        sliding_window="types",
        activation_key="hidden_activation",
        defaults=_GEMMA_DEFAULTS
        | {
            "sliding_window_pattern": 6,
            "num_attention_heads": 8,
            "max_position_embeddings": 131072,
            "vocab_size": 262208,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "num_key_value_heads": 4,
        },
        inert=frozenset(["hidden_act"]),
        read_fields=_read_gemma3,
    ),
    "Cohere2ForCausalLM": Family(
        "cohere2",
        LayerStyle(norm="layer", placement="parallel", rope_pairs="interleaved"),
        sliding_window="types",
        no_rope="full",
        eps_key="layer_norm_eps",
        defaults={
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "tie_word_embeddings": True,
            "layer_norm_eps": 1e-5,
        },
        constants={
            "order_of_interleaved_layers": "local_attn_first",
            "position_embedding_type": "rope_gptj",
            "rotary_pct": 1.0,
            "use_gated_activation": True,
            "use_parallel_block": True,
            "use_embedding_sharing": True,
        },
        inert=frozenset(["use_parallel_embedding"]),
        read_fields=_read_cohere2,
    ),
    "SeedOssForCausalLM": Family(
        "seed_oss",
        qkv_bias="attention_bias",
        output_bias="attention_out_bias",
        mlp_bias="mlp_bias",
        defaults={"attention_bias": True, "head_dim": 128, "num_key_value_heads": 8},
        inert=frozenset(["residual_dropout"]),
    ),
    "Starcoder2ForCausalLM": Family(
        "starcoder2",
        LayerStyle(norm="layer", norm_bias=True, activation="gelu_tanh", is_gated=False),
        qkv_bias="use_bias",
        output_bias="use_bias",
        mlp_bias="use_bias",
        sliding_window="all",
        eps_key="norm_epsilon",
        defaults={
            "use_bias": True,
            "tie_word_embeddings": True,
            "hidden_act": "gelu_pytorch_tanh",
            "norm_epsilon": 1e-5,
            "num_key_value_heads": 2,
        },
        constants={"mlp_type": "default", "norm_type": "layer_norm", "scale_attn_weights": True},
        inert=frozenset(
            [
                *("residual_dropout", "embedding_dropout", "activation_function"),
                *("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "layer_norm_epsilon"),
            ]
        ),
    ),
    "Qwen2MoeForCausalLM": Family(
        "qwen2_moe",
        qkv_bias="qkv_bias",
        output_bias=False,
        sliding_window="layers",
        defaults={"qkv_bias": True, "sliding_window": 4096},
        inert=TRAINING_KEYS,
        read_fields=read_qwen2_moe,
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe",
        LayerStyle(qk_norm="head"),
        sliding_window="layers",
        constants={"use_sliding_window": False},
        inert=TRAINING_KEYS,
        read_fields=read_qwen3_moe,
    ),
    "MixtralForCausalLM": Family(
        "mixtral",
        qkv_bias=False,
        output_bias=False,
        sliding_window="all",
        defaults={"num_key_value_heads": 8},
        inert=TRAINING_KEYS,
        read_fields=read_mixtral,
    ),
    "GptOssForCausalLM": Family(
        "gpt_oss",
        LayerStyle(has_sinks=True),
        sliding_window="types",
        defaults={
            "attention_bias": True,
            "head_dim": 64,
            "sliding_window": 128,
            "sliding_window_pattern": 2,
            "rope_theta": 150000.0,
        },
        inert=TRAINING_KEYS | {"initial_context_length"},
        read_fields=read_gpt_oss,
    ),
    "Glm4MoeForCausalLM": Family(
        "glm4_moe",
        rope=RopeKeys(has_partial=True),
        output_bias=False,
        defaults={"partial_rotary_factor": 0.5},
        inert=TRAINING_KEYS,
        read_fields=read_glm4_moe,
    ),
    "MiniMaxM2ForCausalLM": Family(
        "minimax_m2",
        LayerStyle(qk_norm="full"),
        RopeKeys(has_partial=True),
        qkv_bias=False,
        output_bias=False,
        defaults={"head_dim": 128},
        constants={"use_qk_norm": True, "scoring_func": "sigmoid", "use_routing_bias": True},
        inert=TRAINING_KEYS,
        read_fields=read_minimax_m2,
    ),
    "OlmoeForCausalLM": Family(
        "olmoe", LayerStyle(qk_norm="full"), inert=TRAINING_KEYS, read_fields=read_olmoe
    ),
    "GraniteMoeForCausalLM": Family(
        "granitemoe",
        inert=TRAINING_KEYS,
        read_fields=lambda reader: read_granite(reader) | read_granite_moe(reader),
    ),
} | HYBRID_FAMILIES
