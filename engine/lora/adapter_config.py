"""AdapterConfig: the settings of a PEFT adapter that decide its arithmetic; unsupported ones are refused by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.errors import InvalidRequest

# The tensors say which modules these keys select, or the keys matter in training alone.
_INERT = frozenset(
    [
        *("peft_type", "task_type", "base_model_name_or_path", "revision", "inference_mode", "auto_mapping"),
        *("peft_version", "lora_dropout", "target_modules", "exclude_modules", "layers_to_transform"),
        *("layers_pattern", "modules_to_save", "fan_in_fan_out", "runtime_config", "eva_config"),
        *("lora_ga_config", "megatron_core", "qalora_group_size", "ensure_weight_tying"),
    ]
)
_READ = frozenset(
    [
        *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "lora_bias", "bias"),
        "init_lora_weights",
    ]
)
# These leave the base model's weights as they are. Others (PiSSA, OLoRA, CorDA, LoftQ) train beside changed ones.
_PLAIN_INITS = (True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """Rank and scale of each module."""

    rank: int
    alpha: float
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    is_rank_stabilized: bool = False
    has_magnitude: bool = False  # DoRA
    has_bias: bool = False  # of B

    def find_rank(self, module: str) -> int:
        return self.rank_pattern.get(_find_key(self.rank_pattern, module), self.rank)

    def compute_scale(self, module: str) -> float:
        """Return the factor of the module's product."""
        alpha, rank = (
            self.alpha_pattern.get(_find_key(self.alpha_pattern, module), self.alpha),
            self.find_rank(module),
        )
        return alpha / (rank**0.5 if self.is_rank_stabilized else rank)


def read_adapter_config(data: Mapping[str, Any]) -> AdapterConfig:
    """Read the content of `adapter_config.json`.

    Raises:
        InvalidRequest: a key has a value that is not supported.
    """
    if data.get("peft_type") != "LORA":
        raise _refuse("peft_type", data.get("peft_type"), "only LORA is supported")
    for key, value in data.items():
        if key not in _INERT and key not in _READ and value not in (None, False, {}, []):
            raise _refuse(key, value, "it is not supported")
    if data.get("init_lora_weights", True) not in _PLAIN_INITS:
        raise _refuse(
            "init_lora_weights", data["init_lora_weights"], "it changes the weights of the base model"
        )
    if data.get("bias", "none") != "none":
        raise _refuse("bias", data["bias"], "biases of the base model cannot be replaced")
    if data.get("use_dora") and data.get("lora_bias"):
        raise _refuse("lora_bias", True, "it does not work with use_dora")
    rank_pattern = _read_numbers(data, "rank_pattern", whole=True)
    return AdapterConfig(
        rank=int(_read_number("r", data.get("r"), whole=True)),
        alpha=_read_number("lora_alpha", data.get("lora_alpha")),
        rank_pattern={key: int(value) for key, value in rank_pattern.items()},
        alpha_pattern=_read_numbers(data, "alpha_pattern"),
        is_rank_stabilized=bool(data.get("use_rslora")),
        has_magnitude=bool(data.get("use_dora")),
        has_bias=bool(data.get("lora_bias")),
    )


def _find_key(patterns: Mapping[str, object], module: str) -> str:
    """Return the first pattern that matches the end of the module's path, as PEFT does."""
    return next((key for key in patterns if re.match(rf"(.*\.)?({key})$", module)), module)


def _read_numbers(data: Mapping[str, Any], key: str, whole: bool = False) -> dict[str, float]:
    patterns = data.get(key) or {}
    if not isinstance(patterns, dict):
        raise _refuse(key, patterns, "it must be an object of numbers")
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise _refuse(key, pattern, f"it is not a regular expression: {error}") from error
    return {pattern: _read_number(f"{key}.{pattern}", value, whole) for pattern, value in patterns.items()}


def _read_number(key: str, value: object, whole: bool = False) -> float:
    is_number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= 2**20:  # type: ignore[operator]
        raise _refuse(key, value, f"it must be {'a whole' if whole else 'a'} number above 0, at most {2**20}")
    return value  # type: ignore[return-value]


def _refuse(key: str, value: object, why: str) -> InvalidRequest:
    return InvalidRequest(f"adapter_config.json: {key}={str(value)[:200]!r}: {why}", "lora_path")
