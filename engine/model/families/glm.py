"""GLM-4.5 to 4.7."""

from __future__ import annotations

from typing import Any

from engine.model.config_reader import ConfigReader
from engine.model.families.family import Family
from engine.model.families.layer_kinds import TRAINING_KEYS, read_experts
from engine.model.layer_spec import LayerStyle
from engine.model.rope_config import RopeKeys


def _read_glm4_moe(reader: ConfigReader) -> dict[str, Any]:
    """GLM-4.5 to 4.7: sigmoids chosen with a correction in the best groups, and a shared expert; dense layers first."""
    inner_size = reader.integer("moe_intermediate_size")
    num_shared = reader.integer("n_shared_experts", 1, minimum=0)
    num_groups = reader.integer("n_group", 1)
    num_chosen = reader.integer("topk_group", 1)
    spec = read_experts(
        reader, "moe_intermediate_size", score="sigmoid",
        is_normalized=reader.boolean("norm_topk_prob", True),
        scale=reader.number("routed_scaling_factor", 1.0), num_groups=num_groups,
        num_chosen_groups=num_chosen, has_correction_bias=True, shared_size=num_shared * inner_size,
    )
    if spec.num_experts % num_groups or spec.num_experts < 2 * num_groups:
        raise reader.error(
            "n_group", num_groups, f"must divide {spec.num_experts} experts into groups of at least 2"
        )
    if num_chosen > num_groups or spec.top_k > num_chosen * (spec.num_experts // num_groups):
        raise reader.error(
            "topk_group", num_chosen, f"must leave {spec.top_k} experts in at most {num_groups} groups"
        )
    num_dense = reader.integer("first_k_dense_replace", 1, minimum=0)
    num_layers = reader.integer("num_hidden_layers")
    style = LayerStyle(qk_norm="head") if reader.boolean("use_qk_norm", False) else LayerStyle()
    moes = tuple(None if layer < num_dense else spec for layer in range(num_layers))
    num_mtp_layers = reader.integer("num_nextn_predict_layers", 0, minimum=0)
    return {"style": style, "layer_moes": moes, "num_mtp_layers": num_mtp_layers}


FAMILIES: dict[str, Family] = {
    "Glm4MoeForCausalLM": Family(
        "glm4_moe", rope=RopeKeys(has_partial=True), output_bias=False,
        defaults={"partial_rotary_factor": 0.5}, inert=TRAINING_KEYS, read_fields=_read_glm4_moe,
    ),
}
