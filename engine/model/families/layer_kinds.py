"""Reads which layers of a config.json have experts or a state, and the keys that such families share."""

from __future__ import annotations

from typing import Any

from engine.model.config_reader import ConfigReader
from engine.model.mixers.state_spec import StateSpec
from engine.model.moe_spec import MoESpec
from kernels.states import CONV_WIDTHS

# Keys that matter for training only.
TRAINING_KEYS = frozenset(["router_aux_loss_coef", "output_router_logits", "router_jitter_noise"])
_COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


def read_experts(reader: ConfigReader, inner_key: str, **fields: Any) -> MoESpec:
    """Read the sizes; `fields` are further fields of MoESpec."""
    counts = {key: reader.integer(key) for key in _COUNT_KEYS if reader.take(key) is not None}
    # Families use different names, and transformers writes its own.
    num_experts = next(iter(counts.values())) if counts else reader.integer(_COUNT_KEYS[0])
    for key, count in counts.items():
        if count != num_experts:
            raise reader.error(key, count, f"contradicts {next(iter(counts))}={num_experts}")
    top_k = reader.integer("num_experts_per_tok")
    if top_k > num_experts:
        raise reader.error(
            "num_experts_per_tok", top_k, f"must be at most {num_experts}, the number of experts"
        )
    return MoESpec(top_k, num_experts=num_experts, inner_size=reader.integer(inner_key), **fields)


def read_grouped_experts(reader: ConfigReader, has_groups: bool, **fields: Any) -> dict[str, Any]:
    """Read experts chosen from the best groups, with a shared one; the first layers are dense."""
    num_groups = reader.integer("n_group", 1)
    num_chosen = reader.integer("topk_group", 1)
    if not has_groups:
        num_groups = num_chosen = 1
    shared_size = reader.integer("n_shared_experts", 1, minimum=0) * reader.integer("moe_intermediate_size")
    spec = read_experts(
        reader, "moe_intermediate_size", scale=reader.number("routed_scaling_factor", 1.0),
        num_groups=num_groups, num_chosen_groups=num_chosen, shared_size=shared_size, **fields,
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
    types = ["dense" if layer < num_dense else "sparse" for layer in range(num_layers)]
    found = reader.take("mlp_layer_types") or types  # as newer versions of transformers write it
    if not isinstance(found, list) or len(found) != num_layers or not set(found) <= {"dense", "sparse"}:
        raise reader.error("mlp_layer_types", found, f"must be dense or sparse for each of {num_layers} layers")
    num_mtp_layers = reader.integer("num_nextn_predict_layers", 0, minimum=0)
    moes = tuple(None if kind == "dense" else spec for kind in found)
    return {"layer_moes": moes, "num_mtp_layers": num_mtp_layers}


def read_corrected_experts(reader: ConfigReader) -> dict[str, Any]:
    """Read experts of DeepSeek V3: sigmoids, chosen with a correction in the best groups."""
    for key, value in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        reader.constant(key, value)
    is_normalized = reader.boolean("norm_topk_prob", True)
    return read_grouped_experts(
        reader, True, score="sigmoid", is_normalized=is_normalized, has_correction_bias=True
    )


def in_all_layers(reader: ConfigReader, spec: MoESpec) -> dict[str, Any]:
    return {"layer_moes": (spec,) * reader.integer("num_hidden_layers")}


def in_sparse_layers(reader: ConfigReader, spec: MoESpec) -> dict[str, Any]:
    """Read which layers are dense: those of `mlp_only_layers`, and all but each `decoder_sparse_step`-th."""
    num_layers = reader.integer("num_hidden_layers")
    step = reader.integer("decoder_sparse_step", 1)
    dense = reader.take("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        raise reader.error("mlp_only_layers", dense, "must be a list of layer numbers")
    moes = (None if layer in dense or (layer + 1) % step else spec for layer in range(num_layers))
    return {"layer_moes": tuple(moes)}


def place_states(
    reader: ConfigReader, types: list[str], names: tuple[str, ...], spec: StateSpec
) -> dict[str, Any]:
    """Return the layers of these types with the state; at least one layer must have attention."""
    if all(kind in names for kind in types):
        raise reader.error("layer_types", types, "must have at least one attention layer")
    return {"layer_states": tuple(spec if kind in names else None for kind in types)}


def read_conv_width(reader: ConfigReader, key: str, default: int) -> int:
    width = reader.integer(key, default)
    if width not in CONV_WIDTHS:
        raise reader.error(key, width, f"must be one of {', '.join(map(str, CONV_WIDTHS))}")
    return width
