"""Family: the properties of one architecture, and how its config.json is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.model.config_reader import ConfigReader
from engine.model.layer_spec import LLAMA_STYLE, LayerStyle
from engine.model.rope_config import RopeKeys

_PLAIN_ROPE = RopeKeys()
# Returns further fields of ModelConfig.
ReadFields = Callable[[ConfigReader], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Family:
    """The properties of one architecture, and how its config.json is read."""

    model_type: str
    style: LayerStyle = LLAMA_STYLE
    rope: RopeKeys = _PLAIN_ROPE
    # True, false, or the key that decides.
    qkv_bias: bool | str = "attention_bias"
    output_bias: bool | str = "attention_bias"
    mlp_bias: bool | str = False
    # "none": refused; "all": every layer; "layers": `use_sliding_window`, `max_window_layers`, `layer_types`;
    # "types": `layer_types`, or every layer but each `sliding_window_pattern`-th
    sliding_window: Literal["none", "all", "layers", "types"] = "none"
    # Names in `layer_types` of layers with a state; `read_fields` reads their shape
    state_layers: tuple[str, ...] = ()
    # Layers without positions: none, those of `no_rope_layers`, full ones (beside windowed ones), or all without
    # `position_embedding_type` "rope"
    no_rope: Literal["none", "listed", "full", "full if windowed", "without key"] = "none"
    inner_size_key: str = "intermediate_size"
    eps_key: str = "rms_norm_eps"
    activation_key: str = "hidden_act"
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of keys that are absent
    constants: Mapping[str, Any] = field(default_factory=dict)  # keys that may have one value only
    inert: frozenset[str] = frozenset()  # keys without influence
    read_fields: ReadFields | None = None
    other_types: tuple[str, ...] = ()  # further values of model_type
