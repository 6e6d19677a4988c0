"""Models with multi-head latent attention: DeepSeek V2 and V3, Kimi K2, GLM-4.7-Flash, MiniCPM3."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.model.config_reader import ConfigReader
from engine.model.families.family import Family
from engine.model.families.layer_kinds import TRAINING_KEYS, read_corrected_experts, read_grouped_experts
from engine.model.mixers.latent_spec import LatentSpec

_CONSTANTS: Mapping[str, Any] = {"attention_bias": False, "mlp_bias": False, "moe_layer_freq": 1}
_INERT = TRAINING_KEYS | {"aux_loss_alpha", "seq_aux", "ep_size"}


def _read_latent(reader: ConfigReader, **fields: Any) -> dict[str, Any]:
    """Read the sizes. The cache has one key of latent and rotated part for all heads."""
    num_heads = reader.integer("num_attention_heads")
    reader.constant("num_key_value_heads", num_heads)
    query_rank = None if reader.take("q_lora_rank") is None else reader.integer("q_lora_rank")
    sizes = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim")
    rank, rope_size, plain_size = map(reader.integer, sizes)
    if rope_size % 2 or rank % 2:
        raise reader.error("qk_rope_head_dim", rope_size, f"and kv_lora_rank={rank} must be even")
    # What transformers writes beside the sizes that they follow from.
    reader.constant("head_dim", rope_size)
    reader.constant("qk_head_dim", plain_size + rope_size)
    value_size = reader.integer("v_head_dim", reader.integer("hidden_size") // num_heads)
    latent = LatentSpec(rank, rope_size, plain_size, value_size, query_rank, **fields)
    return {"latent": latent, "head_dim": latent.key_size, "num_key_value_heads": 1}


def _read_v2(reader: ConfigReader) -> dict[str, Any]:
    for key, value in (("scoring_func", "softmax"), ("norm_topk_prob", False)):
        reader.constant(key, value)
    method = reader.take("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise reader.error("topk_method", method, "is not supported; supported: greedy, group_limited_greedy")
    return _read_latent(reader) | read_grouped_experts(reader, method != "greedy", group_best=1)


def _read_v3(reader: ConfigReader) -> dict[str, Any]:
    pairs = "interleaved" if reader.boolean("rope_interleave", True) else "halves"
    return _read_latent(reader, rope_pairs=pairs) | read_corrected_experts(reader)


def _read_minicpm3(reader: ConfigReader) -> dict[str, Any]:
    num_layers, hidden_size = reader.integer("num_hidden_layers"), reader.integer("hidden_size")
    return _read_latent(reader, rope_pairs="halves") | {
        "embedding_multiplier": reader.number("scale_emb", 12.0),
        "residual_multiplier": reader.number("scale_depth", 1.4) / math.sqrt(num_layers),
        "logits_multiplier": reader.number("dim_model_base", 256) / hidden_size,
    }


_V3 = Family(
    "deepseek_v3", qkv_bias=False, output_bias=False, constants=_CONSTANTS, inert=_INERT, read_fields=_read_v3,
    other_types=("kimi_k2",),
)
FAMILIES: dict[str, Family] = {
    "DeepseekV2ForCausalLM": replace(_V3, model_type="deepseek_v2", read_fields=_read_v2, other_types=()),
    "DeepseekV3ForCausalLM": _V3,
    "Glm4MoeLiteForCausalLM": replace(_V3, model_type="glm4_moe_lite", other_types=()),
    "MiniCPM3ForCausalLM": replace(
        _V3, model_type="minicpm3", read_fields=_read_minicpm3, other_types=(), inert=frozenset(),
        defaults={"tie_word_embeddings": True},
    ),
}
