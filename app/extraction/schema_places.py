"""The subschemas that hold at one place of a record, and the types that they allow."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from app.extraction.json_spans import Scalar
from app.extraction.pointers import follow, read_reference, split_pointer
from app.extraction.prompt import Schema
from grammar import InvalidGrammar, SchemaValidator

ALTERNATIVES = ("anyOf", "oneOf", "allOf")
KIND_NAMES: dict[type, str] = {
    str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", dict: "object", list: "array"
}


def name_kind(value: Scalar) -> str:
    """The name that JSON Schema has for the type of a value."""
    return KIND_NAMES[type(value)]


def list_places(schema: Schema, pointer: str) -> list[Schema]:
    """The subschemas for the value at a JSON pointer of the record.

    Alternatives and references within the schema are followed.
    """
    places = _open(schema, [schema])
    for step in split_pointer(pointer):
        places = _open(schema, [inner for place in places for inner in _below(place, step)])
    return places


def list_kinds(schema: Schema, pointer: str) -> frozenset[str]:
    """The types that a value may have at a JSON pointer of the record; empty when the schema does not say.

    A number may be an integer.
    """
    kinds = {kind for place in list_places(schema, pointer) for kind in _kinds_of(place)}
    return frozenset(kinds | ({"integer"} if "number" in kinds else set()))


def _open(root: Schema, places: Sequence[Any]) -> list[Schema]:
    """Return the schemas and all schemas that they reference or combine. true and false are left out."""
    found: dict[int, Schema] = {}
    waiting = deque(place for place in places if isinstance(place, dict))
    while waiting:
        place = waiting.popleft()
        if id(place) in found:
            continue
        found[id(place)] = place
        inner = [each for keyword in ALTERNATIVES for each in _list(place.get(keyword))]
        waiting += [each for each in [*inner, _resolve(root, place.get("$ref"))] if isinstance(each, dict)]
    return list(found.values())


def _resolve(root: Schema, reference: Any) -> Any:
    pointer = read_reference(reference)
    return None if pointer is None else follow(root, pointer)


def _below(place: Schema, step: str) -> Iterator[Any]:
    """The schemas of a member or an item."""
    properties = place.get("properties")
    if isinstance(properties, dict) and step in properties:
        yield properties[step]
    elif not step.isdecimal() or "items" not in place:
        named = place.get("patternProperties")
        matching = [inner for name, inner in (named or {}).items() if _matches(name, step)]
        yield from matching or [place.get("additionalProperties")]
    if step.isdecimal():
        first = _list(place.get("prefixItems"))
        yield first[int(step)] if int(step) < len(first) else place.get("items")


def _matches(pattern: str, name: str) -> bool:
    """Match as the validator does: Python's `re` takes exponential time for some user patterns."""
    try:
        return SchemaValidator({"type": "string", "pattern": pattern}).is_valid(name)
    except InvalidGrammar:
        return False


def _kinds_of(place: Schema) -> list[str]:
    if "const" in place or isinstance(place.get("enum"), list):
        values = [place["const"]] if "const" in place else place["enum"]
        return [KIND_NAMES[type(value)] for value in values]
    kinds = place.get("type")
    return [kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str)]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
