"""SpeculativeConfig: the settings of `--speculative-config`, under vLLM's names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from engine.errors import ConfigError

HOST_METHODS = ("ngram", "suffix", "prediction", "forced")
DEVICE_METHODS = ("draft_model", "eagle", "eagle3", "mtp")
METHODS = HOST_METHODS + DEVICE_METHODS
MAX_SPECULATIVE_TOKENS = 128
DEFAULT_NUM_TOKENS = 4


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """How draft tokens are proposed. Drafts change no text, so every setting is about speed only.

    The sources "prediction" (the request's `prediction` field) and "forced" (text to which the grammar allows no
    alternative) are always on.

    Raises:
        ConfigError: a value outside its range.
    """

    method: tuple[str, ...] = ()
    model: str | None = None  # folder or hub name of the draft model or heads
    num_speculative_tokens: int = DEFAULT_NUM_TOKENS  # most drafts of a row in one step
    prompt_lookup_min: int = 5  # tokens of the shortest n-gram that is looked up
    prompt_lookup_max: int = 5
    suffix_decoding_max_tree_depth: int = 24  # longest match plus draft
    suffix_decoding_max_cached_requests: int = 10_000  # answers kept, of all cache salts; 0: none
    suffix_decoding_max_spec_factor: float = 1.0  # drafts per token of the match
    suffix_decoding_min_token_prob: float = 0.1  # least estimated probability of a drafted path
    # Drafts use the request's own noise; greedy: the likeliest token
    draft_sample_method: str = "probabilistic"
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] = ()  # (first, last, k)
    adaptive: bool = True  # draft only as much as raises the expected tokens per second

    def __post_init__(self) -> None:
        for name in self.method:
            if name not in METHODS:
                raise ConfigError(
                    f"speculative_config: method={name!r} must be one of {', '.join(METHODS)}, or a list of them"
                )
        devices = [name for name in self.method if name in DEVICE_METHODS]
        if len(devices) > 1:
            raise ConfigError(
                f"speculative_config: method names {' and '.join(devices)}; one of them is possible"
            )
        if devices and devices != ["mtp"] and self.model is None:
            raise ConfigError(
                f"speculative_config: method={devices[0]!r} needs model, the folder of its weights"
            )
        if self.model is not None and not devices:
            raise ConfigError(
                f"speculative_config: model={self.model!r} belongs to the methods {', '.join(DEVICE_METHODS)}"
            )
        self._check_ranges()
        self._check_table()

    def _check_ranges(self) -> None:
        self._check("num_speculative_tokens", 1, MAX_SPECULATIVE_TOKENS)
        self._check("prompt_lookup_min", 1, 64)
        self._check("prompt_lookup_max", self.prompt_lookup_min, 64)
        self._check("suffix_decoding_max_tree_depth", 2, 256)
        self._check("suffix_decoding_max_cached_requests", 0, 2**24)
        self._check("suffix_decoding_max_spec_factor", 0.1, 16.0)
        self._check("suffix_decoding_min_token_prob", 0.0, 1.0)
        if self.draft_sample_method not in ("greedy", "probabilistic"):
            raise _error("draft_sample_method", self.draft_sample_method, "must be greedy or probabilistic")
        if not isinstance(self.adaptive, bool):
            raise _error("adaptive", self.adaptive, "must be true or false")

    def _check(self, name: str, low: float, high: float) -> None:
        """Check a range; integer bounds are those of an integer."""
        value, is_integer = getattr(self, name), isinstance(low, int)
        is_kind = type(value) is int or (type(value) is float and not is_integer)
        if not is_kind or not low <= value <= high:
            kind, digits = ("an integer", "d") if is_integer else ("a number", "g")
            raise _error(name, value, f"must be {kind} from {low:{digits}} to {high:{digits}}")

    def _check_table(self) -> None:
        last, name = 0, "num_speculative_tokens_per_batch_size"
        for entry in self.num_speculative_tokens_per_batch_size:
            is_valid = len(entry) == 3 and all(type(number) is int for number in entry)
            if not is_valid or not last < entry[0] <= entry[1] or not 0 <= entry[2] <= MAX_SPECULATIVE_TOKENS:
                order = "[first batch size, last batch size, number of drafts], in ascending order"
                raise _error(name, entry, f"must be {order}")
            if not last and entry[0] != 1:
                raise _error(name, entry, "must start at batch size 1")
            last = entry[1]

    @property
    def device_method(self) -> str | None:
        """The source that runs on the device, if any."""
        return next((name for name in self.method if name in DEVICE_METHODS), None)

    def limit_drafts(self, batch_size: int) -> int:
        """Return the most drafts per row in a batch of this size. Gaps of the table continue the entry before."""
        limit = self.num_speculative_tokens
        for first, _, count in self.num_speculative_tokens_per_batch_size:
            if first > batch_size:
                break
            limit = count
        return limit


def parse_speculative_config(text: str) -> SpeculativeConfig:
    """Parse the JSON object of `--speculative-config`."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"speculative_config is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError("speculative_config must be a JSON object")
    known = {field.name for field in fields(SpeculativeConfig)}
    if unknown := sorted(data.keys() - known):
        raise ConfigError(
            f"speculative_config: unknown {', '.join(unknown)}; known: {', '.join(sorted(known))}"
        )
    return SpeculativeConfig(**_read_values(data))


def _read_values(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are set, with their defaults where they depend on other fields."""
    values = {name: value for name, value in data.items() if value is not None}
    method = values.get("method", "draft_model" if "model" in values else "ngram")
    methods = [method] if isinstance(method, str) else method
    if not isinstance(methods, list) or not methods or not all(isinstance(name, str) for name in methods):
        raise _error("method", method, f"must be one of {', '.join(METHODS)}, or a list of them")
    # vLLM has a name for each family's layers.
    values["method"] = tuple(dict.fromkeys("mtp" if name.endswith("_mtp") else name for name in methods))
    if "model" in values and not isinstance(values["model"], str):
        raise _error("model", values["model"], "must be a string")
    # One of the two bounds alone sets both, as in vLLM.
    for name, other in (("min", "max"), ("max", "min")):
        if f"prompt_lookup_{name}" in values:
            values.setdefault(f"prompt_lookup_{other}", values[f"prompt_lookup_{name}"])
    table = values.get("num_speculative_tokens_per_batch_size", [])
    if not isinstance(table, list) or not all(isinstance(entry, list) for entry in table):
        raise _error("num_speculative_tokens_per_batch_size", table, "must be a list of [first, last, k]")
    values["num_speculative_tokens_per_batch_size"] = tuple(tuple(entry) for entry in table)
    return values


def _error(name: str, value: object, reason: str) -> ConfigError:
    return ConfigError(f"speculative_config: {name}={value!r} {reason}")
