"""Scores of a record against the right one: exact after trim and case-fold, numbers equal, lists by F1."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from app.extraction.pointers import escape_pointer

Path = tuple[str | int, ...]
ABSENT = object()


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
        here = f"{pointer}/{escape_pointer(name)}"
        if isinstance(value, dict) and value:
            yield from flatten(value, here)
        else:
            yield here, value


def list_extra(found: Any, wanted: dict[str, Any]) -> list[str]:
    """Return the JSON pointers of values that were found but not wanted, except null and empty ones."""
    values, known = flatten(found) if isinstance(found, dict) else (), dict(flatten(wanted))
    return [
        pointer for pointer, value in values
        if pointer not in known and value is not None and value not in ("", [], {})
    ]


def score_record(found: Any, wanted: dict[str, Any]) -> dict[str, float]:
    """The score of each wanted field by JSON pointer; zero where nothing was found."""
    values = dict(flatten(found)) if isinstance(found, dict) else {}
    return {
        pointer: score_field(values[pointer], value) if pointer in values else 0.0
        for pointer, value in flatten(wanted)
    }


def list_wrong(paths: Sequence[Path], found: Any, wanted: Any) -> Iterator[str]:
    """JSON pointers of the scalars that are not as wanted.

    Args:
        paths: of the scalars of `found`. An item of a list is compared with the wanted item that is most like it.
    """
    pairs: dict[Path, dict[int, int]] = {}
    for path in paths:
        at = next((place for place, step in enumerate(path) if isinstance(step, int)), None)
        target = path
        if at is not None:
            head = path[:at]
            if head not in pairs:
                pairs[head] = _pair_items(_value_at(found, head), _value_at(wanted, head))
            target = (*head, pairs[head].get(int(path[at]), -1), *path[at + 1 :])
        expected = _value_at(wanted, target)
        is_scalar = expected is not ABSENT and not isinstance(expected, dict | list)
        if not (is_scalar and normalize(expected) == normalize(_value_at(found, path))):
            yield "".join(f"/{escape_pointer(str(step))}" for step in path)


def _pair_items(found: Any, wanted: Any) -> dict[int, int]:
    """For each found item the wanted one, not taken yet, that has most of its values."""
    pairs: dict[int, int] = {}
    if not isinstance(found, list) or not isinstance(wanted, list):
        return pairs
    for index, item in enumerate(found):
        likeness = {
            other: sum(score_field(a, b) for a, b in zip(_parts(item), _parts(right), strict=False))
            for other, right in enumerate(wanted)
            if other not in pairs.values()
        }
        best = max(likeness, key=lambda other: likeness[other], default=None)
        if best is not None and likeness[best] > 0:
            pairs[index] = best
    return pairs


def _parts(item: Any) -> list[Any]:
    return [item[name] for name in sorted(item)] if isinstance(item, dict) else [item]


def _value_at(record: Any, path: Path) -> Any:
    value = record
    for step in path:
        is_there = (
            isinstance(step, int) and 0 <= step < len(value) if isinstance(value, list)
            else isinstance(value, dict) and step in value
        )
        if not is_there:
            return ABSENT
        value = value[step]
    return value
