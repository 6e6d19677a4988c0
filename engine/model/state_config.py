"""Reads the layers with states of hybrid families from a config.json."""

from __future__ import annotations

import math
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
    return _place(reader, types, ("linear_attention",), spec)


def read_mamba_states(reader: ConfigReader) -> dict[str, Any]:
    """Granite 4 and Bamba: Mamba-2 in all layers but those of attention."""
    num_heads = reader.integer("mamba_n_heads", 128)
    size = reader.integer("mamba_expand", 2) * reader.integer("hidden_size")
    if reader.take("mamba_d_head") in (None, "auto"):
        value_size = size // num_heads
    else:
        value_size = reader.integer("mamba_d_head")
    spec = StateSpec(
        "mamba",
        _read_width(reader, "mamba_d_conv", 4),
        num_heads=num_heads,
        num_groups=reader.integer("mamba_n_groups", 1),
        key_size=reader.integer("mamba_d_state", 256),
        value_size=value_size,
        conv_bias=reader.boolean("mamba_conv_bias", True),
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
    return _place(reader, types, ("mamba", "linear_attention"), spec)


def read_conv_states(reader: ConfigReader) -> dict[str, Any]:
    """LFM2: short convolutions in all layers but those of attention."""
    num_layers = reader.integer("num_hidden_layers")
    types, full = reader.take("layer_types"), reader.take("full_attn_idxs")
    if types is None:
        types = ["full_attention" if full is None or layer in full else "conv" for layer in range(num_layers)]
    has_bias = reader.boolean("conv_bias", False)
    spec = StateSpec(
        "conv",
        _read_width(reader, "conv_L_cache", 3),
        num_conv_channels=reader.integer("hidden_size"),
        conv_bias=has_bias,
        projection_bias=has_bias,
    )
    return _place(reader, types, ("conv",), spec)


def _place(reader: ConfigReader, types: list[str], names: tuple[str, ...], spec: StateSpec) -> dict[str, Any]:
    """Return the layers of these types with the state; at least one layer must have attention."""
    if all(kind in names for kind in types):
        raise reader.error("layer_types", types, "must have at least one attention layer")
    return {"layer_states": tuple(spec if kind in names else None for kind in types)}


def _read_width(reader: ConfigReader, key: str, default: int) -> int:
    width = reader.integer(key, default)
    if width not in CONV_WIDTHS:
        raise reader.error(key, width, f"must be one of {', '.join(map(str, CONV_WIDTHS))}")
    return width
