"""RopeConfig: the parameters of the rotary embedding, read from old or new keys of config.json."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from engine.model.config_reader import ConfigReader

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
# Types whose max_position_embeddings may be the length before scaling; llama3 gives the length after scaling.
_STRETCHING = ("linear", "dynamic", "yarn", "longrope")
_DEFAULT_THETA = 10000.0
# Bounds that keep all angles finite; the values of checkpoints are far inside.
_THETAS = (1.0, 1e30)
_FACTORS = (1e-3, 1e6)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Parameters of one rotary embedding. Fields after the first four are used by the noted type only.

    `parse_rope` rejects values for which angles would not be finite.
    """

    rope_type: str = "default"
    theta: float = _DEFAULT_THETA
    factor: float = 1.0
    original_max_position_embeddings: int = 2048
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    attention_factor: float | None = None  # yarn; None: from the factor
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn
    short_factor: tuple[float, ...] = ()  # longrope, one per pair
    long_factor: tuple[float, ...] = ()  # longrope
    rotary_share: float = 1.0  # of a head's numbers, the first ones
    axes: tuple[int, ...] = ()  # per rotated pair, in images: 0: time, 1: row, 2: column; (): the position
    query_scaling_beta: float = 0.0  # queries grow by beta * log(1 + position // original length)

    def rotary_dim(self, head_dim: int) -> int:
        """Return how many numbers of a head are rotated."""
        return int(head_dim * self.rotary_share)

    @property
    def stretched_len(self) -> int:
        """Context length after scaling; 0 for types where max_position_embeddings gives it."""
        if self.rope_type not in _STRETCHING:
            return 0
        return int(self.original_max_position_embeddings * self.factor)


def compute_yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True, slots=True)
class RopeKeys:
    """RoPE settings that the config.json of a family may contain."""

    has_layer_types: bool = False  # parameters may differ between full and sliding layers
    has_partial: bool = False  # `partial_rotary_factor`, or `rotary_dim` of the head
    has_sections: bool = False  # sections of a head for places in images; all rotate alike in text
    has_query_scaling: bool = False  # `llama_4_scaling_beta`
    old_longrope_types: tuple[str, ...] = ()  # other names of longrope


def parse_ropes(
    config: ConfigReader, max_position_embeddings: int, where: str, keys: RopeKeys
) -> tuple[RopeConfig, RopeConfig]:
    """Read `rope_parameters` (transformers 5), or `rope_scaling` and `rope_theta` (before).

    Returns the parameters of full and of sliding layers.

    Raises:
        ConfigError: the type is unsupported, or a parameter is missing, out of range or not used by the type.
    """
    new, old = config.take("rope_parameters"), config.take("rope_scaling")
    name = "rope_scaling" if old else "rope_parameters"
    data = old or new or {}
    if not isinstance(data, dict):
        raise config.error(name, data, "must be an object")
    theta = config.number_within("rope_theta", *_THETAS, _DEFAULT_THETA)
    local_theta = theta
    if keys.has_layer_types:
        local_theta = config.number_within("rope_local_base_freq", *_THETAS, theta)
    is_nested = any(isinstance(value, dict) for value in data.values())
    if is_nested and not keys.has_layer_types:
        raise config.error(name, data, "is given per layer type, which is not supported")

    def parse(part: dict[str, Any], where: str, theta: float) -> RopeConfig:
        return _parse_rope(ConfigReader(part, where), config, theta, max_position_embeddings, keys)

    if is_nested:
        parts = [data.get(kind) or {} for kind in ("full_attention", "sliding_attention")]
        if len(data) > 2 or not all(isinstance(part, dict) for part in parts):
            raise config.error(name, data, "must have objects full_attention and sliding_attention")
        full, local = parts
    else:
        # One set of parameters scales the full layers alone where the family tells layers apart.
        full, local = data, {} if keys.has_layer_types else data
    return parse(full, f"{where}: {name}", theta), parse(local, f"{where}: {name}", local_theta)


def _parse_rope(
    reader: ConfigReader, config: ConfigReader, theta: float, max_position_embeddings: int, keys: RopeKeys
) -> RopeConfig:
    share = _parse_share(reader, config, keys)
    theta = reader.number_within("rope_theta", *_THETAS, theta)
    old_type = reader.take("type")
    rope_type = reader.take("rope_type") or old_type or "default"
    if rope_type in keys.old_longrope_types:
        rope_type = "longrope"
    if rope_type == "mrope" and keys.has_sections:  # an older name
        rope_type = "default"
    if rope_type not in ROPE_TYPES:
        raise reader.error("rope_type", rope_type, f"is not supported; supported: {', '.join(ROPE_TYPES)}")
    beta = 0.0
    axes: tuple[int, ...] = ()
    if keys.has_query_scaling:
        beta = reader.optional_number_within("llama_4_scaling_beta", 0.0, 1e3) or 0.0
        reader.take("max_position_embeddings")  # repeats the config's
    if keys.has_sections:
        axes = _parse_axes(reader)
    rope = _parse_scaling(reader, config, rope_type, theta, max_position_embeddings)
    reader.refuse_rest(frozenset())
    return replace(rope, rotary_share=share, query_scaling_beta=beta, axes=axes)


def _parse_axes(reader: ConfigReader) -> tuple[int, ...]:
    """Return the axis of each rotated pair; () if all rotate by the position."""
    sections = reader.take("mrope_section")
    is_interleaved = reader.boolean("mrope_interleaved", False)
    if sections is None:
        return ()
    is_list = isinstance(sections, list) and len(sections) == 3
    if not is_list or any(type(size) is not int or size < 0 for size in sections):
        raise reader.error("mrope_section", sections, "must be three integers of at least 0")
    if not is_interleaved:
        return tuple(axis for axis, size in enumerate(sections) for _ in range(size))
    # Rows and columns have every third pair up to three times their size.
    return tuple(pair % 3 if pair < 3 * sections[pair % 3] else 0 for pair in range(sum(sections)))


def _parse_scaling(
    reader: ConfigReader, config: ConfigReader, rope_type: str, theta: float, max_position_embeddings: int
) -> RopeConfig:
    if rope_type == "default":
        return RopeConfig(rope_type, theta)
    if rope_type in ("linear", "dynamic"):
        # transformers scales these types from max_position_embeddings and ignores any other length.
        original = reader.take("original_max_position_embeddings")
        if original not in (None, max_position_embeddings):
            raise reader.error("original_max_position_embeddings", original, f"is not used by {rope_type}")
        return RopeConfig(
            rope_type, theta, reader.number_within("factor", *_FACTORS), max_position_embeddings
        )
    original = reader.integer("original_max_position_embeddings", max_position_embeddings)
    # Some checkpoints have it at the top level, which has priority.
    original = config.integer("original_max_position_embeddings", original)
    if rope_type == "longrope":
        return _parse_longrope(reader, theta, original, max_position_embeddings / original)
    if rope_type == "yarn":
        return _parse_yarn(reader, theta, original, max_position_embeddings / original)
    low, high = (reader.number_within(f"{name}_freq_factor", *_FACTORS) for name in ("low", "high"))
    if high <= low:
        raise reader.error("high_freq_factor", high, f"must be greater than low_freq_factor={low}")
    return RopeConfig(rope_type, theta, reader.number_within("factor", *_FACTORS), original, low, high)


def _parse_yarn(reader: ConfigReader, theta: float, original: int, factor: float) -> RopeConfig:
    """Read YaRN's parameters; `factor` is the default, computed from the lengths."""
    if theta <= 1:
        # YaRN divides by log(theta).
        raise reader.error("rope_theta", theta, "must be greater than 1 with yarn")
    factor = reader.number_within("factor", *_FACTORS, factor)
    attention_factor = reader.optional_number_within("attention_factor", *_FACTORS)
    if (share := reader.optional_number_within("attn_factor", *_FACTORS)) is not None:
        # An older name, which multiplies what YaRN prescribes.
        attention_factor = attention_factor or share * compute_yarn_mscale(factor, 1.0)
    return RopeConfig(
        "yarn",
        theta,
        factor,
        original,
        attention_factor=attention_factor,
        beta_fast=reader.number_within("beta_fast", *_FACTORS, 32.0),
        beta_slow=reader.number_within("beta_slow", *_FACTORS, 1.0),
        mscale=reader.optional_number_within("mscale", *_FACTORS),
        mscale_all_dim=reader.optional_number_within("mscale_all_dim", *_FACTORS),
        truncate=reader.boolean("truncate", True),
    )


def _parse_longrope(reader: ConfigReader, theta: float, original: int, factor: float) -> RopeConfig:
    """Read longrope's parameters; `factor` is the default, computed from the lengths."""
    return RopeConfig(
        "longrope", theta, reader.number_within("factor", *_FACTORS, factor), original,
        attention_factor=reader.optional_number_within("attention_factor", *_FACTORS),
        short_factor=reader.numbers_within("short_factor", *_FACTORS),
        long_factor=reader.numbers_within("long_factor", *_FACTORS),
    )


def _parse_share(reader: ConfigReader, config: ConfigReader, keys: RopeKeys) -> float:
    """Return the share of a head that is rotated."""
    old, new = config.take("partial_rotary_factor"), reader.take("partial_rotary_factor")
    if keys.has_partial:
        if config.take("rotary_dim") is not None:
            return config.integer("rotary_dim") / config.integer("head_dim")
        default = 1.0 if old is None else config.number_within("partial_rotary_factor", 0.01, 1.0)
        return reader.number_within("partial_rotary_factor", 0.01, 1.0, default)
    for each, factor in ((config, old), (reader, new)):
        if factor not in (None, 1.0):
            raise each.error("partial_rotary_factor", factor, "is not supported; whole heads are rotated")
    return 1.0
