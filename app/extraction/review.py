"""Edits of a record by a person, and its differences from a record that was verified before."""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any, Literal

from app.extraction.json_spans import Leaf, Path, Scalar, scan
from app.extraction.pointers import escape_pointer, split_pointer
from app.extraction.prompt import Schema
from app.extraction.schema_places import list_kinds, name_kind

# Longer stretches of items that all differ are matched by their place.
MAX_PAIRS = 10_000
ChangeKind = Literal["same", "changed", "new", "missing"]


class EditError(ValueError):
    """An edit refers to a value that the record does not have."""


@dataclass(frozen=True, slots=True)
class Change:
    """One field compared with the verified record; `verified` is None if that lacks the field."""

    kind: ChangeKind
    verified: Scalar = None
    path: Path = field(default=(), compare=False)  # its path, as in Leaf


def apply_edits(record: Any, edits: Mapping[str, str], schema: Schema | None = None) -> Any:
    """Return a copy of the record with typed texts in place of its scalars, by JSON pointer.

    What a text stands for is settled by the types that the schema allows there; where it allows several or says
    nothing, a text stays a text, and what replaces a number, a flag or null becomes one when it reads as one. An
    emptied value is null where the schema allows that.
    """
    edited = copy.deepcopy(record)
    for pointer, text in edits.items():
        kinds = frozenset() if schema is None else list_kinds(schema, pointer)
        if not pointer:
            edited = _read(edited, text, kinds)
            continue
        owner, key = _find_owner(edited, pointer)
        if isinstance(owner[key], dict | list):
            raise EditError(f"{pointer!r} is not a single value")
        owner[key] = _read(owner[key], text, kinds)
    return edited


def change_items(
    record: Any, pointer: str, action: Literal["add", "remove"]
) -> tuple[Any, Callable[[str], str | None]]:
    """Return a copy of the record without a list item, or with an empty item after it, and where its values were.

    The function returns the pointer in the record before of a value after; None for a value of the empty item.
    """
    changed = copy.deepcopy(record)
    owner, key = _find_owner(changed, pointer)
    if not isinstance(owner, list):
        raise EditError(f"{pointer!r} is not in a list")
    if action == "remove":
        del owner[key]
    else:
        owner.insert(key + 1, _empty_like(owner[key]))
    place = pointer.rpartition("/")[0] + "/"
    first, shift = (key, 1) if action == "remove" else (key + 2, -1)

    def find_before(after: str) -> str | None:
        step, slash, rest = after.removeprefix(place).partition("/")
        if not after.startswith(place) or int(step) <= key - (action == "remove"):
            return after
        return f"{place}{int(step) + shift}{slash}{rest}" if int(step) >= first else None

    return changed, find_before


def put_value(record: Any, pointer: str, value: Any) -> Any:
    """Return a copy of the record with another value at a JSON pointer.

    Raises EditError: the record has no such value.
    """
    changed = {"": copy.deepcopy(record)}
    owner, key = _find_owner(changed, f"/{pointer}")
    owner[key] = value
    return changed[""]


def _empty_like(value: Any) -> Any:
    """Return the same structure without its values: a text is "", and 0 or false would be values."""
    if isinstance(value, dict):
        return {name: _empty_like(inner) for name, inner in value.items()}
    return type(value)() if isinstance(value, list | str) else None


def _find_owner(record: Any, pointer: str) -> tuple[Any, Any]:
    """Return the object or list that contains the value at a JSON pointer, and the value's key or index there."""
    owner, key, value = None, None, record
    try:
        for step in split_pointer(pointer):
            owner, key = value, int(step) if isinstance(value, list) else step
            value = owner[key]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise EditError(f"the record has no field at {pointer!r}") from error
    return owner, key


def _read(before: Any, text: str, kinds: Set[str]) -> Any:
    """Return the value that a text stands for; `kinds` are its allowed types, empty if unknown."""
    value = _parse(text)
    if "null" in kinds and (value is None or not text.strip()):
        return None
    takes_text = "string" in kinds if kinds else True
    if takes_text and (isinstance(before, str) or (kinds and name_kind(value) not in kinds)):
        return text
    return value


def _parse(text: str) -> Scalar:
    """Return the number, flag or null that a text represents; otherwise the text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    is_finite = not isinstance(value, float) or math.isfinite(value)
    return value if is_finite and (value is None or isinstance(value, bool | int | float)) else text


def compare(record: Any, verified: Any) -> dict[str, Change]:
    """Compare every scalar of both records, by JSON pointer; items of lists are matched by their content.

    The key of a value that only the verified record has is "-" and its pointer there.
    """
    now, then = _scalars(record), _scalars(verified)
    places: dict[str, str] = {}
    _match_places(record, verified, "", "", places)
    matched = {places[leaf.pointer]: leaf.value for leaf in then.values() if places.get(leaf.pointer) in now}
    changes = {}
    for pointer, leaf in now.items():
        if pointer not in matched:
            changes[pointer] = Change("new", path=leaf.path)
        else:
            value, before = leaf.value, matched[pointer]
            is_same = type(value) is type(before) and value == before
            # JSON has one kind of number.
            is_same |= value == before and not isinstance(value, bool) and isinstance(value, int | float)
            changes[pointer] = Change("same" if is_same else "changed", before, leaf.path)
    missing = [leaf for leaf in then.values() if places.get(leaf.pointer) not in now]
    changes |= {f"-{leaf.pointer}": Change("missing", leaf.value, leaf.path) for leaf in missing}
    return changes


def _match_places(now: Any, then: Any, here: str, there: str, places: dict[str, str]) -> None:
    """Put into `places` the pointer in one record of each value of another one, at `there`, that stands for it."""
    places[there] = here
    if isinstance(now, dict) and isinstance(then, dict):
        for name in now.keys() & then.keys():
            step = escape_pointer(name)
            _match_places(now[name], then[name], f"{here}/{step}", f"{there}/{step}", places)
    elif isinstance(now, list) and isinstance(then, list):
        for first, second in _match_items(now, then):
            _match_places(now[first], then[second], f"{here}/{first}", f"{there}/{second}", places)


def _match_items(now: list[Any], then: list[Any]) -> Iterator[tuple[int, int]]:
    """Yield the indices of items that stand for each other, in order: equal ones, and between these similar ones."""
    texts, others = ([json.dumps(item, sort_keys=True) for item in items] for items in (now, then))
    for kind, first, last, start, end in SequenceMatcher(None, texts, others, autojunk=False).get_opcodes():
        if kind == "equal" or (last - first) * (end - start) > MAX_PAIRS:
            yield from zip(range(first, last), range(start, end), strict=False)
        else:
            similar = _match_similar(now[first:last], then[start:end])
            yield from ((first + one, start + other) for one, other in similar)


def _match_similar(now: list[Any], then: list[Any]) -> Iterator[tuple[int, int]]:
    """Yield the pairs of items, in order, that have most equal fields in all, and then the most pairs."""
    one_field = len(now) + len(then)
    gains = [[1 + one_field * _count_equal(one, other) for other in then] for one in now]
    best = [[0] * (len(then) + 1) for _ in range(len(now) + 1)]  # from these two items on
    for first, second in itertools.product(reversed(range(len(now))), reversed(range(len(then)))):
        paired = gains[first][second] + best[first + 1][second + 1]
        best[first][second] = max(paired, best[first + 1][second], best[first][second + 1])
    first = second = 0
    while first < len(now) and second < len(then):
        if best[first][second] == gains[first][second] + best[first + 1][second + 1]:
            yield first, second
            first, second = first + 1, second + 1
        elif best[first][second] == best[first + 1][second]:
            first += 1
        else:
            second += 1


def _count_equal(one: Any, other: Any) -> int:
    if isinstance(one, dict) and isinstance(other, dict):
        return sum(name in other and other[name] == value for name, value in one.items())
    return int(one == other)


def _scalars(record: Any) -> dict[str, Leaf]:
    return {leaf.pointer: leaf for leaf in scan(json.dumps(record, ensure_ascii=False) + " ").leaves}
