"""Reads the layers with states of hybrid families from a config.json."""

from __future__ import annotations

from typing import Any

from engine.model.config_reader import ConfigReader
from engine.model.state_spec import StateSpec
from kernels.states import CONV_WIDTHS


def read_delta_states(reader: ConfigReader, *, has_fused_names: bool = False) -> dict[str, Any]:
    """Qwen3-Next and 3.5: gated delta nets, with full attention in every fourth layer if no layer types are given."""
    num_layers = reader.integer("num_hidden_layers")
    interval = reader.integer("full_attention_interval", 4)
    types = reader.take("layer_types") or [
        "linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(num_layers)
    ]
    spec = StateSpec(
        "delta",
        _read_width(reader, "linear_conv_kernel_dim", 4),
        num_heads=reader.integer("linear_num_value_heads", 32),
        num_groups=reader.integer("linear_num_key_heads", 16),
        key_size=reader.integer("linear_key_head_dim", 128),
        value_size=reader.integer("linear_value_head_dim", 128),
        has_fused_names=has_fused_names,
    )
    if spec.num_heads % spec.num_groups:
        raise reader.error(
            "linear_num_value_heads",
            spec.num_heads,
            f"must be a multiple of linear_num_key_heads={spec.num_groups}",
        )
    return _place(reader, types, "linear_attention", spec)


def _place(reader: ConfigReader, types: list[str], name: str, spec: StateSpec) -> dict[str, Any]:
    """Return the layers of this type with the state; at least one layer must have attention."""
    if all(kind == name for kind in types):
        raise reader.error("layer_types", types, "must have at least one attention layer")
    return {"layer_states": tuple(spec if kind == name else None for kind in types)}


def _read_width(reader: ConfigReader, key: str, default: int) -> int:
    width = reader.integer(key, default)
    if width not in CONV_WIDTHS:
        raise reader.error(key, width, f"must be one of {', '.join(map(str, CONV_WIDTHS))}")
    return width
