"""A record that a person corrects: edits by field, and what differs from a record that was verified before."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from app.extraction.json_spans import Scalar, scan

ChangeKind = Literal["same", "changed", "new", "missing"]


class EditError(ValueError):
    """An edit that names no value of the record."""


@dataclass(frozen=True, slots=True)
class Change:
    """One field against the verified record; `verified` is None where that has no such field."""

    kind: ChangeKind
    verified: Scalar = None


def apply_edits(record: Any, edits: Mapping[str, str]) -> Any:
    """A copy of the record with typed texts in place of its scalars, by JSON pointer.

    A text stays a text; in place of a number, a flag or null, what reads as one becomes one.

    Raises:
        EditError: there is no scalar at a pointer.
    """
    edited = copy.deepcopy(record)
    for pointer, text in edits.items():
        steps = [step.replace("~1", "/").replace("~0", "~") for step in pointer.split("/")[1:]]
        if not steps:
            edited = _read(edited, text)
            continue
        owner = edited
        try:
            for step in steps[:-1]:
                owner = owner[_key(owner, step)]
            key = _key(owner, steps[-1])
            before = owner[key]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise EditError(f"the record has no field at {pointer!r}") from error
        if isinstance(before, dict | list):
            raise EditError(f"{pointer!r} is no single value")
        owner[key] = _read(before, text)
    return edited


def _key(owner: Any, step: str) -> Any:
    return int(step) if isinstance(owner, list) else step


def _read(before: Any, text: str) -> Any:
    if isinstance(before, str):
        return text
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return text if isinstance(value, dict | list | str) else value


def compare(record: Any, verified: Any) -> dict[str, Change]:
    """By JSON pointer, every scalar of either record."""
    now, then = _scalars(record), _scalars(verified)
    changes = {}
    for pointer, value in now.items():
        if pointer not in then:
            changes[pointer] = Change("new")
        else:
            is_same = type(value) is type(then[pointer]) and value == then[pointer]
            # JSON has one kind of number.
            is_same |= (
                value == then[pointer] and not isinstance(value, bool) and isinstance(value, int | float)
            )
            changes[pointer] = Change("same" if is_same else "changed", then[pointer])
    changes |= {pointer: Change("missing", value) for pointer, value in then.items() if pointer not in now}
    return changes


def _scalars(record: Any) -> dict[str, Scalar]:
    leaves = scan(json.dumps(record, ensure_ascii=False) + " ").leaves
    return {leaf.pointer: leaf.value for leaf in leaves}
