"""Limits on strings and lists that a schema leaves open, so that a looping model cannot fill the whole context.

Only places where a limit makes the schema stricter are touched: never below `not`, `oneOf`, `if` or
`contains`, where narrowing a part may widen the whole. What was added is listed, and the record is
checked against the schema as the user wrote it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from app.extraction.prompt import Schema

# Keywords whose subschemas must all hold (or may be chosen): stricter parts make a stricter whole.
SUBSCHEMA_KEYWORDS = ("items", "additionalProperties", "additionalItems")
SUBSCHEMA_LIST_KEYWORDS = ("anyOf", "allOf", "prefixItems")
SUBSCHEMA_MAP_KEYWORDS = ("properties", "patternProperties", "$defs", "definitions")
# A value under one of these is limited already, or a length beside it is a matter of its own.
STRING_LIMITS = ("maxLength", "enum", "const", "pattern", "format")
ARRAY_LIMITS = ("maxItems", "enum", "const")
# Keywords under which a stricter part may make the whole accept more.
OPPOSING_KEYWORDS = ("not", "oneOf", "if", "then", "else", "contains", "dependentSchemas", "propertyNames")


@dataclass(frozen=True, slots=True)
class Limits:
    """What open strings and lists are cut to."""

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
    """Limit what the schema leaves open; None leaves it as it is."""
    if limits is None:
        return BoundedSchema(schema)
    # Through JSON: a copy in which no two places share one dict.
    bounded = json.loads(json.dumps(schema))
    added: list[Bound] = []
    for pointer, subschema in _subschemas(bounded, "", skip_definitions=_has_opposed_reference(schema)):
        added += _limit(subschema, pointer, limits)
    return BoundedSchema(bounded, tuple(added))


def _limit(subschema: Schema, pointer: str, limits: Limits) -> Iterator[Bound]:
    kinds = subschema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "string" in kinds and not any(keyword in subschema for keyword in STRING_LIMITS):
        yield _set(subschema, pointer, "maxLength", max(limits.max_length, _least(subschema, "minLength")))
    if "array" in kinds and not any(keyword in subschema for keyword in ARRAY_LIMITS):
        yield _set(subschema, pointer, "maxItems", max(limits.max_items, _least(subschema, "minItems")))


def _set(subschema: Schema, pointer: str, keyword: str, value: int) -> Bound:
    subschema[keyword] = value
    return Bound(pointer, keyword, value)


def _least(subschema: Schema, keyword: str) -> int:
    value = subschema.get(keyword, 0)
    return value if isinstance(value, int) else 0


def _subschemas(schema: Any, pointer: str, skip_definitions: bool) -> Iterator[tuple[str, Schema]]:
    if not isinstance(schema, dict):
        return
    yield pointer, schema
    for keyword, value in list(schema.items()):
        here = f"{pointer}/{keyword}"
        if keyword in SUBSCHEMA_KEYWORDS:
            yield from _subschemas(value, here, skip_definitions)
        elif keyword in SUBSCHEMA_LIST_KEYWORDS and isinstance(value, list):
            for index, item in enumerate(value):
                yield from _subschemas(item, f"{here}/{index}", skip_definitions)
        elif keyword in SUBSCHEMA_MAP_KEYWORDS and isinstance(value, dict):
            if skip_definitions and keyword in ("$defs", "definitions"):
                continue
            for name, item in value.items():
                yield from _subschemas(item, f"{here}/{escape_pointer(name)}", skip_definitions)


def _has_opposed_reference(schema: Any) -> bool:
    """Whether a definition may be used below an opposing keyword; then no definition is touched."""
    if isinstance(schema, list):
        return any(_has_opposed_reference(item) for item in schema)
    if not isinstance(schema, dict):
        return False
    opposed = [schema[keyword] for keyword in OPPOSING_KEYWORDS if keyword in schema]
    return '"$ref"' in json.dumps(opposed) or any(_has_opposed_reference(value) for value in schema.values())


def escape_pointer(name: str) -> str:
    """A property name as a step of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")
