"""Families close to Llama: Llama, Mistral, Ministral 3, Mixtral, MiniMax M2, SmolLM3, Seed-OSS."""

from __future__ import annotations

from typing import Any

from engine.model.config_reader import ConfigReader
from engine.model.families.family import Family
from engine.model.families.layer_kinds import TRAINING_KEYS, in_all_layers, read_experts
from engine.model.layer_spec import LayerStyle
from engine.model.moe_spec import MoENames
from engine.model.rope_config import RopeKeys

_MIXTRAL_NAMES = MoENames(
    block="block_sparse_moe", correction_bias="e_score_correction_bias", experts=("w1", "w3", "w2")
)
# Keys that change no result: those of draft layers, whose weights are not published, and of the older MiniMax.
_MINIMAX_INERT = frozenset(
    [
        *("use_mtp", "num_mtp_modules", "mtp_transformer_layers", "mlp_intermediate_size", "max_model_len"),
        *("layernorm_full_attention_beta", "layernorm_linear_attention_beta", "layernorm_mlp_beta"),
        *("shared_moe_mode", "use_grouped_topk"),
    ]
)


def _read_mixtral(reader: ConfigReader) -> dict[str, Any]:
    """Mixtral: weights are normalized."""
    spec = read_experts(reader, "intermediate_size", is_normalized=True, names=_MIXTRAL_NAMES)
    return in_all_layers(reader, spec)


def _read_minimax_m2(reader: ConfigReader) -> dict[str, Any]:
    """MiniMax M2: normalized sigmoids, chosen with a correction."""
    reader.constant("attn_type_list", [1] * reader.integer("num_hidden_layers"))  # softmax
    spec = read_experts(
        reader, "intermediate_size", score="sigmoid", is_normalized=True, has_correction_bias=True,
        names=_MIXTRAL_NAMES,
    )
    return in_all_layers(reader, spec)


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", mlp_bias="mlp_bias"),
    "MistralForCausalLM": Family(
        "mistral", qkv_bias=False, output_bias=False, sliding_window="all",
        defaults={"sliding_window": 4096, "num_key_value_heads": 8},
    ),
    "Ministral3ForCausalLM": Family(
        "ministral3", rope=RopeKeys(has_query_scaling=True), qkv_bias=False, output_bias=False,
        sliding_window="all", defaults={"num_key_value_heads": 8, "head_dim": 128},
    ),
    "MixtralForCausalLM": Family(
        "mixtral", qkv_bias=False, output_bias=False, sliding_window="all",
        defaults={"num_key_value_heads": 8}, inert=TRAINING_KEYS, read_fields=_read_mixtral,
    ),
    "MiniMaxM2ForCausalLM": Family(
        "minimax_m2", LayerStyle(qk_norm="full"), RopeKeys(has_partial=True), qkv_bias=False,
        output_bias=False, defaults={"head_dim": 128},
        constants={
            "use_qk_norm": True, "scoring_func": "sigmoid", "use_routing_bias": True, "qk_norm_type": "per_layer",
        },
        inert=TRAINING_KEYS | _MINIMAX_INERT, read_fields=_read_minimax_m2,
    ),
    "SmolLM3ForCausalLM": Family(
        "smollm3", mlp_bias="mlp_bias", sliding_window="layers", no_rope="listed",
        defaults={"tie_word_embeddings": True, "rope_theta": 2e6, "max_window_layers": 0},
    ),
    "SeedOssForCausalLM": Family(
        "seed_oss", qkv_bias="attention_bias", output_bias="attention_out_bias", mlp_bias="mlp_bias",
        defaults={"attention_bias": True, "head_dim": 128, "num_key_value_heads": 8},
        inert=frozenset(["residual_dropout"]),
    ),
}
