"""Shapes of well-known models, for work with random weights: the same arithmetic without the download."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Json = dict[str, Any]


def _make(model_type: str, architecture: str, **fields: Any) -> Json:
    return {
        "architectures": [architecture], "model_type": model_type, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "attention_bias": False, "max_position_embeddings": 40960,
        "rope_theta": 1000000.0, "dtype": "bfloat16", "eos_token_id": 0, "bos_token_id": 0, **fields,
    }


def _qwen3(layers: int, width: int, heads: int, inner: int, is_tied: bool) -> Json:
    return _make(
        "qwen3", "Qwen3ForCausalLM", num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads,
        num_key_value_heads=8, head_dim=128, intermediate_size=inner, vocab_size=151936,
        tie_word_embeddings=is_tied,
    )


SHAPES: dict[str, Json] = {
    "qwen3-0.6b": _qwen3(28, 1024, 16, 3072, True),
    "qwen3-8b": _qwen3(36, 4096, 32, 12288, False),
    "qwen3-14b": _qwen3(40, 5120, 40, 17408, False),
    # The layers of Qwen3-30B-A3B, 4 of 48.
    "qwen3-30b-a3b-4l": _make(
        "qwen3_moe", "Qwen3MoeForCausalLM", num_hidden_layers=4, hidden_size=2048, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, intermediate_size=6144, moe_intermediate_size=768, num_experts=128,
        num_experts_per_tok=8, norm_topk_prob=True, vocab_size=151936, tie_word_embeddings=False,
    ),
    "smollm2-135m": _make(
        "llama", "LlamaForCausalLM", num_hidden_layers=30, hidden_size=576, num_attention_heads=9,
        num_key_value_heads=3, head_dim=64, intermediate_size=1536, vocab_size=49152,
        tie_word_embeddings=True, max_position_embeddings=8192, rope_theta=100000.0,
    ),
}


def write_shape(name: str, folder: Path) -> Path:
    """Write the shape's config.json into `folder` and return it; there are no weights and no tokenizer."""
    target = folder / name
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(SHAPES[name], indent=2) + "\n")
    return target
