"""Plain schemas: those of which llguidance enforces every keyword, so that it gets the user's own text.

What is not known here is not plain; such a schema is read into nodes (`reader.py`), which takes half a millisecond.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from ..regex.text import ends_in_escape
from .exactness import LONG_ESCAPED, MAX_BOUND
from .formats import ENGINE_FORMATS
from .keywords import TYPES_OF_KEYWORD
from .patterns import make_safe

ANNOTATIONS = frozenset(
    ["title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$schema", "$comment"]
)
_TYPES = frozenset(["object", "array", "string", "number", "integer", "boolean", "null"])
_BOUNDS = frozenset(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
_COUNTS = frozenset(["minLength", "maxLength", "minItems", "maxItems"])
_DEFINITIONS = ("$defs", "definitions")
_REFERENCE = {f"#/{place}/": place for place in _DEFINITIONS}


def check_plain(root: Mapping[str, Any]) -> bool | None:
    """Return None for a schema that is not plain, else whether an object in it lists names and allows others."""
    reading = _Reading(root)
    pending: list[Any] = [root]
    while pending:
        schema = pending.pop()
        if schema is True:
            continue
        if not isinstance(schema, dict) or not reading.takes(schema):
            return None
        pending += reading.list_children(schema)
    # Open names allow short escapes only, of which a pattern may need others.
    return None if reading.has_pattern and reading.is_open else reading.is_open


class _Reading:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._referred: set[str] = set()
        self.is_open = False
        self.has_pattern = False

    def takes(self, schema: dict[str, Any]) -> bool:
        """Return whether every keyword of a schema itself is plain."""
        keys = {key for key in schema if key not in ANNOTATIONS and not is_note(key)}
        if schema is self._root:
            keys -= {*_DEFINITIONS}
        if "$ref" in keys or "anyOf" in keys:
            return len(keys) == 1 and ("$ref" not in keys or self._find(schema["$ref"]) is not None)
        kinds = schema.get("type", [])
        types = {kinds} if isinstance(kinds, str) else set(kinds)
        if not types <= _TYPES or ("type" in keys and not types):
            return False
        if "object" in types and schema.get("additionalProperties") is not False:
            self.is_open |= bool(schema.get("properties"))
        return all(_is_plain(key, schema, types) for key in keys - {"type"}) and self._note_pattern(keys)

    def _note_pattern(self, keys: set[str]) -> bool:
        self.has_pattern |= "pattern" in keys
        return True

    def _find(self, reference: Any) -> Any:
        """Return what a reference leads to, None if that is not plain: a definition with a type."""
        place = next((place for start, place in _REFERENCE.items() if str(reference).startswith(start)), None)
        if place is None or not isinstance(self._root.get(place), dict):
            return None
        found = self._root[place].get(reference[len(place) + 3 :])
        return found if isinstance(found, dict) and "type" in found else None

    def list_children(self, schema: dict[str, Any]) -> Iterator[Any]:
        yield from (schema.get("properties") or {}).values()
        yield from (schema[key] for key in ("additionalProperties", "items") if schema.get(key, False) is not False)
        yield from schema.get("anyOf", ())
        reference = schema.get("$ref")
        if reference is not None and reference not in self._referred:
            self._referred.add(reference)
            yield self._find(reference)


def is_note(key: str) -> bool:
    """Return whether a keyword is a vendor's annotation, which means nothing here."""
    return key.startswith("x-") and key not in ("x-grounded", "x-guidance")


def _is_plain(key: str, schema: dict[str, Any], types: set[str]) -> bool:
    value = schema[key]
    if key in ("enum", "const"):
        return all(_is_plain_value(each, types) for each in (value if key == "enum" else [value]))
    if types.isdisjoint(TYPES_OF_KEYWORD.get(key, ())):
        return False
    match key:
        case "properties" | "items":
            return isinstance(value, dict) or value is True
        case "additionalProperties":
            return isinstance(value, dict | bool)
        case "required":
            return isinstance(value, list) and schema.get("properties", {}).keys() >= {*value}
        case "format":
            return value in ENGINE_FORMATS
        case "pattern":
            return isinstance(value, str) and make_safe(value) == value and not ends_in_escape(value)
        case "uniqueItems":
            return value is False
    is_count = isinstance(value, int) and not isinstance(value, bool)
    return (key in _COUNTS and is_count) or (key in _BOUNDS and is_count and abs(value) < MAX_BOUND)


def _is_plain_value(value: Any, types: set[str]) -> bool:
    """Return whether a listed value has one spelling, which llguidance writes."""
    if isinstance(value, str):
        return LONG_ESCAPED.isdisjoint(value) and types <= {"string", "null"}
    if isinstance(value, bool) or value is None:
        return not types
    return isinstance(value, int) and types == {"integer"} and abs(value) < MAX_BOUND
