"""Which values of a record are quotations: free strings, as opposed to choices, dates, times and patterns.

Such strings can be grounded: the grammar then lets them be nothing but parts of the source text. Dates and
amounts are grounded by listing those that the text offers (candidates.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from app.extraction.bounds import allows_strings, walk_narrowable
from app.extraction.candidates import bind_amounts
from app.extraction.prompt import Schema

GROUNDED = "x-grounded"
# A string under one of these has a form of its own, which need not be that of the text.
FORMED = ("enum", "const", "format", "pattern")


def mark_grounded(schema: Schema, text: str) -> Schema:
    """A copy of the schema in which free strings must be parts of the text, and dates and amounts those in it."""
    marked: Schema = json.loads(json.dumps(schema))
    bind_amounts(marked, text)
    for subschema in _free_strings(marked):
        subschema[GROUNDED] = True
    return marked


def count_free_strings(schema: Schema) -> int:
    """How many places of the schema hold quotations."""
    return sum(1 for _ in _free_strings(schema))


def is_free_at(schema: Schema, pointer: str) -> bool:
    """Whether the value at a JSON pointer of the record is a free string by the schema.

    Follows `properties`, `items` and `anyOf`; what lies elsewhere counts as free.
    """
    places = [schema]
    for step in pointer.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        places = [inner for place in _open(places) for inner in _below(place, name)]
    strings = [place for place in _open(places) if allows_strings(place)]
    return all(not any(keyword in place for keyword in FORMED) for place in strings)


def _open(places: list[Schema]) -> list[Schema]:
    """The schemas and the alternatives in them."""
    return [inner for place in places for inner in (place, *_open(list(place.get("anyOf", ()))))]


def _below(place: Schema, name: str) -> Iterator[Schema]:
    if name in place.get("properties", {}):
        yield place["properties"][name]
    if name.isdigit() and isinstance(place.get("items"), dict):
        yield place["items"]


def _free_strings(schema: Schema) -> Iterator[Schema]:
    for _, subschema in walk_narrowable(schema):
        if allows_strings(subschema) and not any(keyword in subschema for keyword in FORMED):
            yield subschema
