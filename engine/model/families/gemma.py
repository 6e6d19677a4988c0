"""Gemma 2 and 3."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.model.config_reader import ConfigReader
from engine.model.families.family import Family
from engine.model.layer_spec import LayerStyle
from engine.model.rope_config import RopeKeys

_STYLE = LayerStyle(placement="sandwich", norm_offset=1.0, activation="gelu_tanh")
_DEFAULTS = {
    "hidden_activation": "gelu_pytorch_tanh", "head_dim": 256, "tie_word_embeddings": True,
    "sliding_window": 4096,
}


def _read_gemma2(reader: ConfigReader) -> dict[str, Any]:
    return _read_gemma3(reader) | {"soft_cap": reader.optional_number("attn_logit_softcapping")}


def _read_gemma3(reader: ConfigReader) -> dict[str, Any]:
    return {
        "embedding_multiplier": reader.integer("hidden_size") ** 0.5,
        "attention_scale": reader.number("query_pre_attn_scalar", 256) ** -0.5,
        "logits_cap": reader.optional_number("final_logit_softcapping"),
    }


FAMILIES: dict[str, Family] = {
    "Gemma2ForCausalLM": Family(
        "gemma2",
        _STYLE,
        sliding_window="types",
        activation_key="hidden_activation",
        defaults=_DEFAULTS
        | {
            "sliding_window_pattern": 2, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
            "num_key_value_heads": 4,
        },
        inert=frozenset(["hidden_act"]),
        read_fields=_read_gemma2,
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3_text",
        replace(_STYLE, qk_norm="head"),
        RopeKeys(has_layer_types=True),
        sliding_window="types",
        activation_key="hidden_activation",
        defaults=_DEFAULTS
        | {
            "sliding_window_pattern": 6, "num_attention_heads": 8, "max_position_embeddings": 131072,
            "vocab_size": 262208, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "num_key_value_heads": 4,
        },
        inert=frozenset(["hidden_act"]),
        read_fields=_read_gemma3,
    ),
}
