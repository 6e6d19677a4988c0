"""OLMo 2 and 3, and OLMoE."""

from __future__ import annotations

from typing import Any

from engine.model.config_reader import ConfigReader
from engine.model.families.family import Family
from engine.model.families.layer_kinds import TRAINING_KEYS, in_all_layers, read_experts
from engine.model.layer_spec import LayerStyle
from engine.model.rope_config import RopeKeys


def _read_olmoe(reader: ConfigReader) -> dict[str, Any]:
    """OLMoE: softmax weights, normalized if the config says so."""
    is_normalized = reader.boolean("norm_topk_prob", False)
    return in_all_layers(reader, read_experts(reader, "intermediate_size", is_normalized=is_normalized))


FAMILIES: dict[str, Family] = {
    "Olmo2ForCausalLM": Family("olmo2", LayerStyle(placement="post", qk_norm="full")),
    "Olmo3ForCausalLM": Family(
        "olmo3", LayerStyle(placement="post", qk_norm="full"), RopeKeys(has_layer_types=True),
        sliding_window="types",
        defaults={"rope_theta": 5e5, "sliding_window": 4096, "sliding_window_pattern": 4},
    ),
    "OlmoeForCausalLM": Family(
        "olmoe", LayerStyle(qk_norm="full"), inert=TRAINING_KEYS, read_fields=_read_olmoe
    ),
}
