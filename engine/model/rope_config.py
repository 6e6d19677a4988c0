"""RopeConfig: the parameters of the rotary embedding, read from old or new keys of config.json."""

from __future__ import annotations

from dataclasses import dataclass

from engine.model.config_reader import ConfigReader

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")
# Types whose max_position_embeddings may be the length before scaling; llama3 gives the length after scaling.
_STRETCHING = ("linear", "dynamic", "yarn")
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

    @property
    def stretched_len(self) -> int:
        """Context length after scaling; 0 for types where max_position_embeddings gives it."""
        if self.rope_type not in _STRETCHING:
            return 0
        return int(self.original_max_position_embeddings * self.factor)


def parse_rope(config: ConfigReader, max_position_embeddings: int, where: str) -> RopeConfig:
    """Read `rope_parameters` (transformers 5), or `rope_scaling` and `rope_theta` (before).

    Raises:
        ConfigError: the type is unsupported, or a parameter is missing, out of range or not used by the type.
    """
    new, old = config.take("rope_parameters"), config.take("rope_scaling")
    name = "rope_scaling" if old else "rope_parameters"
    data = old or new or {}
    if not isinstance(data, dict):
        raise config.error(name, data, "must be an object")
    if any(isinstance(value, dict) for value in data.values()):
        raise config.error(name, data, "is given per layer type, which is not supported")
    reader = ConfigReader(data, f"{where}: {name}")
    _refuse_partial(config)
    _refuse_partial(reader)
    theta = reader.number_within(
        "rope_theta", *_THETAS, config.number_within("rope_theta", *_THETAS, _DEFAULT_THETA)
    )
    old_type = reader.take("type")
    rope_type = reader.take("rope_type") or old_type or "default"
    if rope_type not in ROPE_TYPES:
        raise reader.error("rope_type", rope_type, f"is not supported; supported: {', '.join(ROPE_TYPES)}")
    rope = _parse_scaling(reader, config, rope_type, theta, max_position_embeddings)
    reader.refuse_rest(frozenset())
    return rope


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
    return RopeConfig(
        "yarn",
        theta,
        reader.number_within("factor", *_FACTORS, factor),
        original,
        attention_factor=reader.optional_number_within("attention_factor", *_FACTORS),
        beta_fast=reader.number_within("beta_fast", *_FACTORS, 32.0),
        beta_slow=reader.number_within("beta_slow", *_FACTORS, 1.0),
        mscale=reader.optional_number_within("mscale", *_FACTORS),
        mscale_all_dim=reader.optional_number_within("mscale_all_dim", *_FACTORS),
        truncate=reader.boolean("truncate", True),
    )


def _refuse_partial(reader: ConfigReader) -> None:
    factor = reader.take("partial_rotary_factor")
    if factor not in (None, 1.0):
        raise reader.error("partial_rotary_factor", factor, "is not supported; whole heads are rotated")
