"""Lengths for strings and lists that a schema leaves open, so that a looping model cannot fill the whole context.

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
from typing import Any

from app.extraction.pointers import escape_pointer, follow, list_references, read_reference, walk_objects
from app.extraction.prompt import Schema

# Keywords whose subschemas must all hold (or may be chosen): stricter parts make a stricter whole.
SUBSCHEMA_KEYWORDS = ("items", "additionalProperties", "additionalItems")
SUBSCHEMA_LIST_KEYWORDS = ("anyOf", "allOf", "prefixItems")
SUBSCHEMA_MAP_KEYWORDS = ("properties", "patternProperties", "$defs", "definitions")
# A value under one of these is limited already, or a length beside it is a matter of its own.
STRING_LIMITS = ("maxLength", "enum", "const", "pattern", "format")
ARRAY_LIMITS = ("maxItems", "enum", "const")
# Beside these a place is limited by what stands elsewhere.
COMBINING = ("$ref", "allOf", "anyOf", "oneOf", "not", "if", "$dynamicRef")
# A branch beside which others hold for the same value.
IN_ALL_OF = re.compile(r"/allOf/\d+(/(any|all)Of/\d+)*\Z")
# Keywords under which a stricter part may make the whole accept more.
OPPOSING_KEYWORDS = ("not", "oneOf", "if", "then", "else", "contains", "dependentSchemas", "propertyNames")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits for strings and lists without one."""

    max_length: int = 200  # characters
    max_items: int = 32


@dataclass(frozen=True, slots=True)
class Bound:
    """One limit that was added."""

    pointer: str  # JSON pointer to the subschema, "" for the root
    keyword: str  # "maxLength" or "maxItems"
    value: int


@dataclass(frozen=True, slots=True)
class BoundedSchema:
    """A schema with limits, and what was added to the user's."""

    schema: Schema
    added: tuple[Bound, ...] = field(default=())


def add_bounds(schema: Schema, limits: Limits | None) -> BoundedSchema:
    """Add limits to strings and lists without one; None adds nothing."""
    if limits is None:
        return BoundedSchema(schema)
    # Through JSON: a copy in which no two places share one dict.
    bounded = json.loads(json.dumps(schema))
    limits = _raise_limits(limits, schema)
    added = [
        bound
        for pointer, subschema in walk_narrowable(bounded)
        for bound in _limit(subschema, pointer, limits)
    ]
    return BoundedSchema(bounded, tuple(added))


def describe_added(bounds: BoundedSchema) -> list[str]:
    """Describe the lengths that were added to the user's schema."""
    values = {bound.keyword: bound.value for bound in bounds.added}
    words = {"maxLength": "characters a text", "maxItems": "items a list"}
    return [f"{values[keyword]} {what}" for keyword, what in words.items() if keyword in values]


def walk_narrowable(schema: Schema) -> Iterator[tuple[str, Schema]]:
    """(JSON pointer, subschema) of every place where a stricter part makes the whole stricter."""
    yield from _subschemas(schema, "", _find_opposed(schema))


def allows_strings(subschema: Schema) -> bool:
    kinds = subschema.get("type")
    return "string" in (kinds if isinstance(kinds, list) else [kinds])


def _raise_limits(limits: Limits, schema: Any) -> Limits:
    """Raise the limits to the largest minLength and minItems of the schema, which may apply anywhere in it."""
    return replace(
        limits,
        max_length=max([limits.max_length, *_list_asked(schema, ("minLength",))]),
        max_items=max([limits.max_items, *_list_asked(schema, ("minItems", "minContains"))]),
    )


def _list_asked(node: Any, keywords: tuple[str, ...]) -> Iterator[int]:
    """The values of the keywords, wherever they stand."""
    if isinstance(node, list):
        for item in node:
            yield from _list_asked(item, keywords)
    elif isinstance(node, dict):
        asked = [node[keyword] for keyword in keywords if keyword in node]
        yield from (
            math.ceil(least)
            for least in asked
            if isinstance(least, int) or (isinstance(least, float) and math.isfinite(least))
        )
        for inner in node.values():
            yield from _list_asked(inner, keywords)


def _limit(subschema: Schema, pointer: str, limits: Limits) -> Iterator[Bound]:
    # A pattern or a list of values may hold here that does not stand here.
    if IN_ALL_OF.search(pointer) is not None or any(keyword in subschema for keyword in COMBINING):
        return
    kinds = subschema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if allows_strings(subschema) and not any(keyword in subschema for keyword in STRING_LIMITS):
        yield _set(subschema, pointer, "maxLength", limits.max_length)
    if "array" in kinds and not any(keyword in subschema for keyword in ARRAY_LIMITS):
        yield _set(subschema, pointer, "maxItems", limits.max_items)


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
