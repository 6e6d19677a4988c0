"""Shrinks a transformers config to a model of the same structure that is built and run in a fraction of a second."""

from __future__ import annotations

import re
from typing import Any

from transformers import PreTrainedConfig

VOCAB_SIZE = 128
WINDOW = 8
_MAX_LAYERS = 12
_HIDDEN, _HEADS, _HEAD_SIZE = 64, 4, 16

# Key of config.json -> value of the tiny model. Absent and null keys stay as they are.
_VALUES: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "word_embed_proj_dim", "emb_dim"), _HIDDEN),
    **dict.fromkeys(("embedding_size", "attention_hidden_size", "lru_width", "embedding_dim"), _HIDDEN),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), _HEADS),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), _HEADS),
    **dict.fromkeys(
        ("head_dim", "attention_head_size", "v_head_dim", "qk_nope_head_dim", "d_kv"), _HEAD_SIZE
    ),
    **dict.fromkeys(("kv_channels", "swa_head_dim", "swa_v_head_dim", "d_head", "dim_head"), _HEAD_SIZE),
    **dict.fromkeys(("global_head_dim", "d_rel"), _HEAD_SIZE),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), _HEAD_SIZE // 2),
    "qk_head_dim": _HEAD_SIZE + _HEAD_SIZE // 2,
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank", "router_hidden_size"), 32),
    **dict.fromkeys(("hidden_size_per_layer_input", "laurel_rank", "gated_norm_rank"), 8),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size"), VOCAB_SIZE),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "window_size", "local_attention"), WINDOW),
    **dict.fromkeys(
        ("attention_window_size", "attention_chunk_size", "keep_window_size", "floor_scale"), WINDOW
    ),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "n_group"), 2),
    **dict.fromkeys(("topk_group", "num_expert_group", "first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("dim_model_base", "embed_dim"), _HIDDEN),
    **dict.fromkeys(("depth", "num_experts_per_token"), 2),
    **dict.fromkeys(("mamba_n_heads", "n_mamba_heads"), 8),
    "mamba_d_head": _HEAD_SIZE,
    "zero_expert_num": 2,
}
_NUM_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "num_global_key_value_heads")
_INNER = re.compile(r"(intermediate_size.*|ffn_dim|ffn_hidden_size|n_inner|dff|dim_ff|d_inner)$")
_SPECIAL = re.compile(r"(_token_id|_token_ids|_token_index|_index)$")


def shrink_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a config of the same class with small sizes, few layers and windows of 8 tokens.

    Each kind of layer that the config lists occurs at least once.

    Raises:
        ValueError, TypeError: the sizes of this class depend on each other in another way.
    """
    small = _shrink_config(config.to_dict())
    small.pop("model_type", None)
    return type(config)(**small)


def _shrink_config(data: dict[str, Any]) -> dict[str, Any]:
    """Shrink the dictionary of one config, and of the configs in it."""
    num_layers = next((data[key] for key in _NUM_LAYERS if isinstance(data.get(key), int)), 1)
    kept = _count_layers(data, num_layers)
    filled = {**data, **{key: _HEAD_SIZE for key in ("head_dim",) if key in data and data[key] is None}}
    small = {key: _shrink(key, value, filled, num_layers, kept) for key, value in filled.items()}
    if small.get("num_kv_shared_layers"):
        small["num_kv_shared_layers"] = max(1, kept // 2)
    small.pop("transformers_version", None)
    return small


def _count_layers(data: dict[str, Any], num_layers: int) -> int:
    """Return the length of the shortest start of the model that has a layer of each listed kind, at least 2."""
    lists = [value for value in data.values() if isinstance(value, list) and len(value) == num_layers > 1]
    kinds = [repr(kind) for kind in zip(*lists, strict=True)]
    wanted = max((kinds.index(kind) + 1 for kind in set(kinds)), default=2)
    shared = data.get("num_kv_shared_layers") or 0
    return min(num_layers, max(2, 2 * wanted if shared else wanted), _MAX_LAYERS)


def _shrink(key: str, value: Any, data: dict[str, Any], num_layers: int, kept: int) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, dict):
        return _shrink_dict(key, value, data, num_layers, kept)
    if isinstance(value, list):
        is_per_layer = len(value) == num_layers > 1
        value = value[:kept] if is_per_layer else value
        return [_shrink(key, each, data, num_layers, kept) for each in value]
    if key in _NUM_LAYERS:
        return kept
    if key in _KV_HEADS:
        return _shrink_kv_heads(value, data)
    if _INNER.search(key):
        return 32 if "moe" in key or "expert" in key else 96
    if _SPECIAL.search(key):
        return value % VOCAB_SIZE if isinstance(value, int) else value
    if key == "head_dim" and value == data.get("qk_rope_head_dim"):
        return _VALUES["qk_rope_head_dim"]
    return min(_VALUES[key], value) if key in _VALUES and value else value


def _shrink_kv_heads(value: int, data: dict[str, Any]) -> int:
    heads = next((data[key] for key in ("num_attention_heads", "n_head", "n_heads") if data.get(key)), value)
    return 1 if value == 1 else _HEADS if value == heads else _HEADS // 2


def _shrink_dict(key: str, value: dict[Any, Any], data: dict[str, Any], num_layers: int, kept: int) -> Any:
    if key in ("rope_parameters", "rope_scaling"):
        return _shrink_rope(value)
    if "model_type" in value:
        return _shrink_config(value)
    if key == "per_layer_config":
        value = {layer: each for layer, each in value.items() if int(layer) < kept}
    return {
        name: _shrink(str(name), each, {**data, **value}, num_layers, kept) for name, each in value.items()
    }


def _shrink_rope(value: dict[str, Any]) -> Any:
    """Cut the factors of longrope and the sections of mrope to the tiny head."""
    small: dict[str, Any] = {}
    for name, each in value.items():
        small[name] = _shrink_rope(each) if isinstance(each, dict) else each
    num_pairs = int(_HEAD_SIZE * (small.get("partial_rotary_factor") or 1.0)) // 2
    for name in ("long_factor", "short_factor"):
        if isinstance(small.get(name), list):
            small[name] = small[name][:num_pairs]
    if isinstance(small.get("mrope_section"), list):
        part = num_pairs * 3 // 8
        small["mrope_section"] = [num_pairs - 2 * part, part, part]
    return small
