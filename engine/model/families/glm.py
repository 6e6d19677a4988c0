"""GLM-4.5 to 4.7."""

from __future__ import annotations

from typing import Any

from engine.model.config_reader import ConfigReader
from engine.model.families.family import Family
from engine.model.families.layer_kinds import TRAINING_KEYS, read_corrected_experts
from engine.model.layer_spec import LayerStyle
from engine.model.rope_config import RopeKeys


def _read_glm4_moe(reader: ConfigReader) -> dict[str, Any]:
    """GLM-4.5 to 4.7: sigmoids chosen with a correction in the best groups, and a shared expert; dense layers first."""
    style = LayerStyle(qk_norm="head") if reader.boolean("use_qk_norm", False) else LayerStyle()
    return {"style": style} | read_corrected_experts(reader)


FAMILIES: dict[str, Family] = {
    "Glm4MoeForCausalLM": Family(
        "glm4_moe", rope=RopeKeys(has_partial=True), output_bias=False,
        defaults={"partial_rotary_factor": 0.5}, inert=TRAINING_KEYS, read_fields=_read_glm4_moe,
    ),
}
