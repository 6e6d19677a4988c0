"""Granite 3 and 4, and Bamba: scaled residuals, experts, and Mamba-2 layers."""

from __future__ import annotations

import math
from typing import Any

from engine.model.config_reader import ConfigReader
from engine.model.families.family import Family
from engine.model.families.layer_kinds import (
    TRAINING_KEYS,
    in_all_layers,
    place_states,
    read_conv_width,
    read_experts,
)
from engine.model.layer_spec import LayerStyle
from engine.model.mixers.state_spec import StateSpec
from engine.model.moe_spec import MoENames
from engine.model.rope_config import RopeKeys

_NAMES = MoENames(
    block="block_sparse_moe", router="router.layer", layout="stacked",
    experts=("input_linear", "output_linear"), shared="shared_mlp",
)
_MAMBA_LAYERS = ("mamba", "linear_attention")
_MAMBA_INERT = frozenset(
    [
        *("time_step_limit", "time_step_min", "time_step_max"),
        *("init_method", "num_logits_to_keep", "z_loss_coefficient", "attn_rotary_emb"),
        *(f"mamba_{name}" for name in ("n_heads", "n_groups", "d_state", "d_head", "d_conv", "expand")),
        *(f"mamba_{name}" for name in ("chunk_size", "conv_bias", "proj_bias")),
    ]
)


def _read_granite(reader: ConfigReader) -> dict[str, Any]:
    return {
        "embedding_multiplier": reader.number("embedding_multiplier", 1.0),
        "residual_multiplier": reader.number("residual_multiplier", 1.0),
        "attention_scale": reader.number("attention_multiplier", 1.0),
        "logits_multiplier": 1.0 / reader.number("logits_scaling", 1.0),
    }


def _read_experts(reader: ConfigReader, shared_size: int = 0) -> dict[str, Any]:
    """Granite-MoE: softmax over the chosen experts."""
    spec = read_experts(
        reader, "intermediate_size", score="topk_softmax", names=_NAMES, shared_size=shared_size
    )
    return in_all_layers(reader, spec)


def _read_granite4(reader: ConfigReader) -> dict[str, Any]:
    fields, prefix = _read_granite(reader), "mlp"
    types = reader.take("layer_types") or []
    if not types or any(kind in _MAMBA_LAYERS for kind in types):
        fields |= _read_mamba_states(reader)
    if reader.integer("num_local_experts", 8, minimum=0):
        prefix = "block_sparse_moe.shared_mlp"
        fields |= _read_experts(reader, reader.integer("shared_intermediate_size"))
    names = (("gate_up_proj", "input_linear"), ("down_proj", "output_linear"))
    renames = tuple((f"{prefix}.{ours}", f"shared_mlp.{theirs}") for ours, theirs in names)
    return fields | {"weight_renames": renames}


def _read_bamba(reader: ConfigReader) -> dict[str, Any]:
    names = (
        ("mlp.", "feed_forward."),
        ("post_attention_layernorm", "pre_ff_layernorm"),
        ("model.norm", "model.final_layernorm"),
    )
    return _read_mamba_states(reader) | {"weight_renames": names}


def _read_mamba_states(reader: ConfigReader) -> dict[str, Any]:
    """Granite 4 and Bamba: Mamba-2 in all layers but those of attention."""
    num_heads = reader.integer("mamba_n_heads", 128)
    size = reader.integer("mamba_expand", 2) * reader.integer("hidden_size")
    if reader.take("mamba_d_head") in (None, "auto"):
        value_size = size // num_heads
    else:
        value_size = reader.integer("mamba_d_head")
    spec = StateSpec(
        "mamba", read_conv_width(reader, "mamba_d_conv", 4), num_heads=num_heads,
        num_groups=reader.integer("mamba_n_groups", 1), key_size=reader.integer("mamba_d_state", 256),
        value_size=value_size, conv_bias=reader.boolean("mamba_conv_bias", True),
        projection_bias=reader.boolean("mamba_proj_bias", False),
    )
    if num_heads * value_size != size:
        raise reader.error("mamba_n_heads", num_heads, f"heads of {value_size} must make up {size} numbers")
    if num_heads % spec.num_groups:
        raise reader.error("mamba_n_groups", spec.num_groups, f"must divide mamba_n_heads={num_heads}")
    limit = reader.take("time_step_limit")
    if limit not in (None, [0.0, math.inf], [0.0, {"__float__": "Infinity"}]):
        raise reader.error("time_step_limit", limit, "is not supported; supported: 0 to infinity")
    types = reader.take("layer_types")
    if types is None:
        full = reader.take("attn_layer_indices") or []
        types = [
            "attention" if layer in full else "mamba" for layer in range(reader.integer("num_hidden_layers"))
        ]
    return place_states(reader, types, ("mamba", "linear_attention"), spec)


FAMILIES: dict[str, Family] = {
    "GraniteForCausalLM": Family("granite", mlp_bias="mlp_bias", read_fields=_read_granite),
    "GraniteMoeForCausalLM": Family(
        "granitemoe",
        inert=TRAINING_KEYS,
        read_fields=lambda reader: _read_granite(reader) | _read_experts(reader),
    ),
    "GraniteMoeHybridForCausalLM": Family(
        "granitemoehybrid", LayerStyle(has_fused_names=True), inner_size_key="shared_intermediate_size",
        no_rope="without key", state_layers=_MAMBA_LAYERS, constants={"normalization_function": "rmsnorm"},
        inert=TRAINING_KEYS | _MAMBA_INERT | {"intermediate_size", "num_experts_per_tok"},
        read_fields=_read_granite4,
    ),
    "BambaForCausalLM": Family(
        "bamba", rope=RopeKeys(has_partial=True), mlp_bias="mlp_bias",
        defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
        inert=TRAINING_KEYS | _MAMBA_INERT, read_fields=_read_bamba,
    ),
}
