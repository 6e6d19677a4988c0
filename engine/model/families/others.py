"""Families of one architecture each: Phi-3 and 4, EXAONE 4, Command R7B, StarCoder2."""

from __future__ import annotations

from typing import Any

from engine.model.config_reader import ConfigReader
from engine.model.families.family import Family
from engine.model.layer_spec import LayerStyle
from engine.model.rope_config import RopeKeys


def _read_cohere2(reader: ConfigReader) -> dict[str, Any]:
    return {"logits_multiplier": reader.number("logit_scale", 0.0625)}


FAMILIES: dict[str, Family] = {
    "Phi3ForCausalLM": Family(
        "phi3", LayerStyle(has_fused_qkv=True, has_fused_names=True),
        RopeKeys(has_partial=True, old_longrope_types=("su", "yarn")), qkv_bias=False, output_bias=False,
        sliding_window="all", constants={"full_attn_mod": 1, "interpolate_factor": 1},
        inert=frozenset(["original_max_position_embeddings"]),
    ),
    "Exaone4ForCausalLM": Family(
        "exaone4", LayerStyle(placement="post", qk_norm="head"), qkv_bias=False, output_bias=False,
        sliding_window="types", no_rope="full if windowed",
        defaults={"sliding_window": 4096, "sliding_window_pattern": 4, "num_key_value_heads": 32},
    ),
    "Cohere2ForCausalLM": Family(
        "cohere2",
        LayerStyle(norm="layer", placement="parallel", rope_pairs="interleaved"),
        sliding_window="types",
        no_rope="full",
        eps_key="layer_norm_eps",
        defaults={
            "sliding_window": 4096, "sliding_window_pattern": 4, "tie_word_embeddings": True,
            "layer_norm_eps": 1e-5,
        },
        constants={
            "order_of_interleaved_layers": "local_attn_first", "position_embedding_type": "rope_gptj",
            "rotary_pct": 1.0, "use_gated_activation": True, "use_parallel_block": True,
            "use_embedding_sharing": True,
        },
        inert=frozenset(["use_parallel_embedding"]),
        read_fields=_read_cohere2,
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
            "use_bias": True, "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh",
            "norm_epsilon": 1e-5, "num_key_value_heads": 2,
        },
        constants={"mlp_type": "default", "norm_type": "layer_norm", "scale_attn_weights": True},
        inert=frozenset(
            [
                *("residual_dropout", "embedding_dropout", "activation_function"),
                *("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "layer_norm_epsilon"),
            ]
        ),
    ),
}
