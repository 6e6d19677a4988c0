"""ConfigReader: reads typed values from a config.json and rejects keys that were not read."""

from __future__ import annotations

import sys
from typing import Any

from engine.errors import ConfigError

_MISSING: Any = object()
# JSON integers may exceed both.
_LARGEST = sys.float_info.max
_LARGEST_INTEGER = 2**63 - 1


class ConfigReader:
    """Reads and checks single keys; `refuse_rest` rejects the keys that would be ignored.

    Args:
        data: the parsed JSON object.
        where: its name in error messages, e.g. "config.json".

    All readers raise ConfigError, with key and value, if a value has the wrong type or range.
    """

    def __init__(self, data: dict[str, Any], where: str) -> None:
        self._data = data
        self._where = where
        self._taken: set[str] = set()

    def take(self, key: str, default: Any = None) -> Any:
        self._taken.add(key)
        return self._data.get(key, default)

    def integer(self, key: str, default: Any = _MISSING, minimum: int = 1) -> int:
        """Return an integer from `minimum` to 2**63 - 1; null counts as absent."""
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(key, value, f"must be an integer of at least {minimum}")
        if value > _LARGEST_INTEGER:
            raise self.error(key, value, f"must be an integer from {minimum} to {_LARGEST_INTEGER}")
        return value

    def number(self, key: str, default: Any = _MISSING) -> float:
        """Return a positive number; null counts as absent."""
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _LARGEST:
            raise self.error(key, value, "must be a positive number")
        return float(value)

    def number_within(self, key: str, low: float, high: float, default: Any = _MISSING) -> float:
        """Return a positive number from `low` to `high`; null counts as absent."""
        value = self.number(key, default)
        if not low <= value <= high:
            raise self.error(key, value, f"must be a number from {low:g} to {high:g}")
        return value

    def optional_number(self, key: str) -> float | None:
        """Return a positive number, or None when the key is absent or null."""
        return None if self.take(key) is None else self.number(key)

    def optional_number_within(self, key: str, low: float, high: float) -> float | None:
        """Return a positive number from `low` to `high`, or None when the key is absent or null."""
        if self.take(key) is None:
            return None
        return self.number_within(key, low, high)

    def numbers_within(self, key: str, low: float, high: float) -> tuple[float, ...]:
        """Return a list of numbers from `low` to `high`."""
        values = self._required(key, _MISSING)
        is_list = isinstance(values, list) and not any(isinstance(value, bool) for value in values)
        if not is_list or not all(
            isinstance(value, int | float) and low <= value <= high for value in values
        ):
            raise self.error(key, values, f"must be a list of numbers from {low:g} to {high:g}")
        return tuple(float(value) for value in values)

    def constant(self, key: str, value: Any) -> None:
        """Accept one value of a key, which the arithmetic assumes; null counts as absent."""
        if self.take(key) not in (None, value):
            raise self.error(key, self.take(key), f"is not supported; supported: {value!r}")

    def boolean(self, key: str, default: bool) -> bool:
        """Return true or false; null counts as absent."""
        value = self._required(key, default)
        if not isinstance(value, bool):
            raise self.error(key, value, "must be true or false")
        return value

    def error(self, key: str, value: Any, reason: str) -> ConfigError:
        return ConfigError(f"{self._where}: {key}={value!r} {reason}")

    def refuse_rest(self, inert: frozenset[str]) -> None:
        """Reject keys that were not taken, unless they are in `inert` or null, false or empty."""
        rest = [
            key
            for key, value in self._data.items()
            if key not in self._taken and not _is_inert(key, inert) and value not in (None, False, "", [], {})
        ]
        if rest:
            shown = ", ".join(f"{key}={self._data[key]!r}"[:80] for key in sorted(rest))
            raise ConfigError(f"{self._where}: fields that this engine does not support: {shown}")

    def _required(self, key: str, default: Any) -> Any:
        value = self.take(key)
        if value is None:
            value = default
        if value is _MISSING:
            raise ConfigError(f"{self._where}: the field {key} is missing")
        return value


def _is_inert(key: str, inert: frozenset[str]) -> bool:
    return key in inert or key.startswith("_") or key.endswith(("_version", "_token_id"))
