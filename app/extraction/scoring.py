"""Scores of a record against the right one: exact after trim and case-fold, numbers equal, lists by F1."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def normalize(value: Any) -> Any:
    """The form in which values are compared."""
    if isinstance(value, str):
        return value.strip().casefold()
    if isinstance(value, bool) or value is None:
        return repr(value), "literal"  # never equal to a number
    if isinstance(value, int | float):
        return value  # compared exactly, as 2**53 + 1 and 2**53 are not the same
    if isinstance(value, dict):
        return tuple(sorted((name, normalize(inner)) for name, inner in value.items()))
    return [normalize(item) for item in value]


def score_field(found: Any, wanted: Any) -> float:
    """1 or 0 for scalars and objects, F1 over the items for lists."""
    a, b = normalize(found), normalize(wanted)
    if not isinstance(b, list):
        return float(a == b)
    if not isinstance(a, list) or (not a) != (not b):
        return 0.0
    if not b:
        return 1.0
    left = list(a)
    for item in b:
        if item in left:
            left.remove(item)
    return 2 * (len(a) - len(left)) / (len(a) + len(b))


def flatten(record: dict[str, Any], pointer: str = "") -> Iterator[tuple[str, Any]]:
    """(JSON pointer, value) of the fields of a record, those of inner objects one by one."""
    for name, value in record.items():
        here = f"{pointer}/{name.replace('~', '~0').replace('/', '~1')}"
        if isinstance(value, dict) and value:
            yield from flatten(value, here)
        else:
            yield here, value


def list_extra(found: Any, wanted: dict[str, Any]) -> list[str]:
    """Return the JSON pointers of values that were found but not wanted, except null and empty ones."""
    values = dict(flatten(found)) if isinstance(found, dict) else {}
    known = {pointer for pointer, _ in flatten(wanted)}
    return [
        pointer
        for pointer, value in values.items()
        if pointer not in known and value is not None and value not in ("", [], {})
    ]


def score_record(found: Any, wanted: dict[str, Any]) -> dict[str, float]:
    """The score of each wanted field by JSON pointer; zero where nothing was found."""
    values = dict(flatten(found)) if isinstance(found, dict) else {}
    return {
        pointer: score_field(values[pointer], value) if pointer in values else 0.0
        for pointer, value in flatten(wanted)
    }
