"""Limits for strings, lists and numbers that a schema leaves open, so that a looping model cannot fill the context.

Only places where a limit makes the schema stricter are touched: never below `not`, `oneOf`, `if` or
`contains`, nor what a reference there leads to, where narrowing a part may widen the whole; nor below `enum` and
`const`, where it may leave nothing. What was added is listed and shown, and the record is checked against the
schema as the user wrote it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any

from app.extraction.numbers import find_numbers
from app.extraction.pointers import escape_pointer, follow, list_references, read_reference, walk_objects
from app.extraction.prompt import Schema

# Keywords whose subschemas must all hold (or may be chosen): stricter parts make a stricter whole.
SUBSCHEMA_KEYWORDS = ("items", "additionalProperties", "additionalItems")
SUBSCHEMA_LIST_KEYWORDS = ("anyOf", "allOf", "prefixItems")
SUBSCHEMA_MAP_KEYWORDS = ("properties", "patternProperties", "$defs", "definitions")
# A value under one of these is limited already, or a length beside it is a matter of its own.
STRING_LIMITS = ("maxLength", "enum", "const", "pattern", "format")
ARRAY_LIMITS = ("maxItems", "enum", "const")
NUMBER_LIMITS = ("enum", "const")
LOWER, UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
# Beside these a place is limited by what stands elsewhere.
COMBINING = ("$ref", "allOf", "anyOf", "oneOf", "not", "if", "$dynamicRef")
# A branch beside which others hold for the same value.
IN_ALL_OF = re.compile(r"/allOf/\d+(/(any|all)Of/\d+)*\Z")
# Keywords under which a stricter part may make the whole accept more.
OPPOSING_KEYWORDS = ("not", "oneOf", "if", "then", "else", "contains", "dependentSchemas", "propertyNames")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits for strings, lists and numbers without one.

    With 15 digits before the point, a double holds every whole number; more than 10 behind it, llguidance does not
    count. Numbers have no limit, or none behind the point, where the text or the schema has one with more.
    """

    max_length: int = 200  # characters
    max_items: int = 32
    max_digits: int | None = 15
    max_decimals: int | None = 10


@dataclass(frozen=True, slots=True)
class Bound:
    """One limit that was added."""

    pointer: str  # JSON pointer to the subschema, "" for the root
    keyword: str  # "maxLength", "maxItems", "digits" or "decimals"
    value: int


@dataclass(frozen=True, slots=True)
class BoundedSchema:
    """A schema with limits, and what was added to the user's."""

    schema: Schema
    added: tuple[Bound, ...] = field(default=())


def add_bounds(schema: Schema, limits: Limits | None, text: str = "") -> BoundedSchema:
    """Add limits to strings, lists and numbers without one, which leave every number of the text; None adds nothing."""
    if limits is None:
        return BoundedSchema(schema)
    # Through JSON: a copy in which no two places share one dict.
    bounded = json.loads(json.dumps(schema))
    places = list(walk_narrowable(bounded))
    limits = _raise_limits(limits, schema)
    if any(list_types(subschema) & {"number", "integer"} for _, subschema in places):
        limits = _raise_digits(limits, schema, text)
    added = [bound for pointer, subschema in places for bound in _limit(subschema, pointer, limits)]
    return BoundedSchema(bounded, tuple(added))


def describe_added(bounds: BoundedSchema) -> list[str]:
    """Describe the lengths that were added to the user's schema."""
    values = {bound.keyword: bound.value for bound in bounds.added}
    words = {"maxLength": "characters a text", "maxItems": "items a list", "digits": "digits a number"}
    return [f"{values[keyword]} {what}" for keyword, what in words.items() if keyword in values]


def walk_narrowable(schema: Schema) -> Iterator[tuple[str, Schema]]:
    """(JSON pointer, subschema) of every place where a stricter part makes the whole stricter."""
    yield from _subschemas(schema, "", _find_opposed(schema))


def allows_strings(subschema: Schema) -> bool:
    return "string" in list_types(subschema)


def count_digits(value: int | float) -> tuple[int, int]:
    """Return how many digits a number has before and behind its point."""
    _, digits, exponent = Decimal(repr(value)).as_tuple()
    assert isinstance(exponent, int), "the number is finite"
    return max(len(digits) + exponent, 1), max(-exponent, 0)


def list_types(subschema: Schema) -> set[str]:
    """Return the types that a subschema names."""
    kinds = subschema.get("type")
    return {kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str)}


def _raise_limits(limits: Limits, schema: Any) -> Limits:
    """Raise the limits to the largest minLength and minItems of the schema, which may apply anywhere in it."""
    return replace(
        limits,
        max_length=max([limits.max_length, *_list_asked(schema, ("minLength",))]),
        max_items=max([limits.max_items, *_list_asked(schema, ("minItems", "minContains"))]),
    )


def _raise_digits(limits: Limits, schema: Schema, text: str) -> Limits:
    """Leave out the limits that a number of the schema or of the text exceeds."""
    read = (value for number in find_numbers(text) for value in number.readings)
    sizes = [count_digits(value) for value in (*_list_numbers(schema), *read)]
    most = [max((size[side] for size in sizes), default=0) for side in (0, 1)]
    return replace(
        limits,
        max_digits=limits.max_digits if limits.max_digits and most[0] <= limits.max_digits else None,
        max_decimals=limits.max_decimals if limits.max_decimals and most[1] <= limits.max_decimals else None,
    )


def _list_numbers(node: Any) -> Iterator[int | float]:
    """Every finite number in a schema, whatever it stands for."""
    waiting = [node]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict | list):
            waiting += value.values() if isinstance(value, dict) else value
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            yield value


def _list_asked(schema: Any, keywords: tuple[str, ...]) -> Iterator[int]:
    """The values of the keywords, wherever they stand."""
    asked = (node[keyword] for node in walk_objects(schema) for keyword in keywords if keyword in node)
    return (
        math.ceil(least) for least in asked
        if isinstance(least, int) or (isinstance(least, float) and math.isfinite(least))
    )


def _limit(subschema: Schema, pointer: str, limits: Limits) -> Iterator[Bound]:
    # A pattern or a list of values may hold here that does not stand here.
    if IN_ALL_OF.search(pointer) is not None or any(keyword in subschema for keyword in COMBINING):
        return
    kinds = list_types(subschema)
    if "string" in kinds and not any(keyword in subschema for keyword in STRING_LIMITS):
        yield _set(subschema, pointer, "maxLength", limits.max_length)
    if "array" in kinds and not any(keyword in subschema for keyword in ARRAY_LIMITS):
        yield _set(subschema, pointer, "maxItems", limits.max_items)
    if kinds & {"number", "integer"} and not any(keyword in subschema for keyword in NUMBER_LIMITS):
        yield from _limit_number(subschema, pointer, limits, "number" in kinds)


def _limit_number(subschema: Schema, pointer: str, limits: Limits, has_decimals: bool) -> Iterator[Bound]:
    is_open = [not any(keyword in subschema for keyword in side) for side in (LOWER, UPPER)]
    if limits.max_digits is not None and any(is_open):
        largest = 10**limits.max_digits - 1
        subschema |= {keyword: sign * largest for keyword, sign, free in zip(
            ("minimum", "maximum"), (-1, 1), is_open, strict=True) if free}
        yield Bound(pointer, "digits", limits.max_digits)
    # Between two bounds of the user's own there may be no number with few decimals.
    if limits.max_decimals is not None and has_decimals and any(is_open) and "multipleOf" not in subschema:
        subschema["multipleOf"] = float(f"1e-{limits.max_decimals}")
        yield Bound(pointer, "decimals", limits.max_decimals)


def _set(subschema: Schema, pointer: str, keyword: str, value: int) -> Bound:
    subschema[keyword] = value
    return Bound(pointer, keyword, value)


def _subschemas(schema: Any, pointer: str, opposed: frozenset[str]) -> Iterator[tuple[str, Schema]]:
    if not isinstance(schema, dict) or pointer in opposed:
        return
    yield pointer, schema
    if "enum" in schema or "const" in schema:
        return  # listed values may exceed a limit
    for keyword, value in list(schema.items()):
        here = f"{pointer}/{keyword}"
        if keyword in SUBSCHEMA_KEYWORDS:
            yield from _subschemas(value, here, opposed)
        elif keyword in SUBSCHEMA_LIST_KEYWORDS and isinstance(value, list):
            for index, item in enumerate(value):
                yield from _subschemas(item, f"{here}/{index}", opposed)
        elif keyword in SUBSCHEMA_MAP_KEYWORDS and isinstance(value, dict):
            for name, item in value.items():
                yield from _subschemas(item, f"{here}/{escape_pointer(name)}", opposed)


def _find_opposed(schema: Schema) -> frozenset[str]:
    """Return the targets of references below an opposing keyword; "", the whole schema, if a target is unknown."""
    opposing = [node[word] for node in walk_objects(schema) for word in OPPOSING_KEYWORDS if word in node]
    waiting = list_references(opposing)
    if waiting and _has_identifiers(schema):
        return frozenset([""])
    found: set[str] = set()
    while waiting:
        target = read_reference(waiting.pop())
        if target is None:
            return frozenset([""])
        if target not in found:
            found.add(target)
            waiting += list_references([follow(schema, target)])
    return frozenset(found)


def _has_identifiers(schema: Schema) -> bool:
    """Return whether a pointer may start from another place than the root."""
    inner = walk_objects(list(schema.values()))
    return any(isinstance(node.get(keyword), str) for node in inner for keyword in ("$id", "id"))
