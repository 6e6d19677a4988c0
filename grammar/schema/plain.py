"""Plain schemas: llguidance enforces all their keywords itself, so it gets the user's own text.

A schema with a keyword that this module does not know is read into nodes (`reader.py`), which takes 0.5 ms.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ..regex.dialects import read_ecma
from ..regex.text import ends_in_escape
from .exactness import LONG_ESCAPED, MAX_BOUND, is_long_escaped
from .formats import CHECKED_FORMATS, ENGINE_FORMATS, EXACT_PATTERNS
from .identifiers import is_reference
from .keywords import ASSERTIONS, NUMERIC_BOUNDS, STRUCTURE_KEYWORDS, TYPES_OF_KEYWORD
from .patterns import make_safe
from .property_order import MAX_NUM_LISTED

_MEANT = ASSERTIONS | STRUCTURE_KEYWORDS - {"$schema"} | {"x-grounded", "x-guidance"}
_TYPES = frozenset(["object", "array", "string", "number", "integer", "boolean", "null"])
_COUNTS = frozenset(["minLength", "maxLength", "minItems", "maxItems"])
_DEFINITIONS = ("$defs", "definitions")
_REFERENCE = {f"#/{place}/": place for place in _DEFINITIONS}


class Plain(NamedTuple):
    """Facts about a plain schema.

    Attributes:
        is_open: an object in it lists names and allows others.
        has_strings: a format or a pattern in it is written as another pattern, or left out (`write_strings`).
    """

    is_open: bool
    has_strings: bool


def check_plain(root: Mapping[str, Any]) -> Plain | None:
    """Return None for a schema that is not plain."""
    reading = _Reading(root)
    pending: list[Any] = [root]
    while pending:
        schema = pending.pop()
        if schema is True:
            continue
        if not isinstance(schema, dict) or not reading.takes(schema):
            return None
        pending += reading.list_children(schema)
    # Names that are not listed may have short escapes only; a pattern may need others.
    return None if reading.has_long_escape and reading.is_open else Plain(reading.is_open, reading.has_strings)


def write_strings(value: Any) -> Any:
    """Return a plain schema without unknown formats, and with patterns that llguidance reads exactly."""
    if isinstance(value, list):
        return [*map(write_strings, value)]
    if not isinstance(value, dict):
        return value
    written = {key: write_strings(each) if isinstance(each, dict | list) else each for key, each in value.items()}
    # A property may have the name of a keyword.
    if isinstance(pattern := written.get("pattern"), str):
        written["pattern"] = make_safe(read_ecma(pattern))
    if isinstance(name := written.get("format"), str) and name not in ENGINE_FORMATS:
        del written["format"]
        if name in EXACT_PATTERNS:
            written["pattern"] = EXACT_PATTERNS[name]
    return written


class _Reading:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._referred: set[str] = set()
        self.is_open = False
        self.has_long_escape = False  # in a pattern
        self.has_strings = False  # formats and patterns to rewrite or leave out

    def takes(self, schema: dict[str, Any]) -> bool:
        """Return whether every keyword of a schema itself is plain."""
        keys = schema.keys() & _MEANT
        if schema is self._root:
            keys -= {*_DEFINITIONS}
            names = [schema[key] for key in keys & {"$id", "id"}]
            if not all(isinstance(name, str) and is_reference(name) for name in names):
                return False
            keys -= {"$id", "id"}
        if "$ref" in keys or "anyOf" in keys:
            return len(keys) == 1 and ("$ref" not in keys or self._find(schema["$ref"]) is not None)
        kinds = schema.get("type", [])
        types = {kinds} if isinstance(kinds, str) else set(kinds)
        if not types <= _TYPES or ("type" in keys and not types):
            return False
        if "object" in (types or _TYPES) and schema.get("additionalProperties") is not False:
            self.is_open |= bool(schema.get("properties"))
        is_large = len(schema.get("properties") or ()) > MAX_NUM_LISTED
        if is_large or not all(_is_plain(key, schema, types) for key in keys - {"type"}):
            return False
        self.has_strings |= "format" in keys and schema["format"] not in ENGINE_FORMATS
        if "pattern" in keys:
            self.has_strings = True
            self.has_long_escape |= is_long_escaped(read_ecma(schema["pattern"]))
        return True

    def _find(self, reference: Any) -> Any:
        """Return the definition that a reference names; None unless it has a type or values."""
        place = next((place for start, place in _REFERENCE.items() if str(reference).startswith(start)), None)
        if place is None or not isinstance(self._root.get(place), dict):
            return None
        found = self._root[place].get(reference[len(place) + 3 :])
        return found if isinstance(found, dict) and not found.keys().isdisjoint(("type", "enum", "const")) else None

    def list_children(self, schema: dict[str, Any]) -> Iterator[Any]:
        yield from (schema.get("properties") or {}).values()
        yield from (schema[key] for key in ("additionalProperties", "items") if schema.get(key, False) is not False)
        yield from schema.get("anyOf", ())
        reference = schema.get("$ref")
        if reference is not None and reference not in self._referred:
            self._referred.add(reference)
            yield self._find(reference)


def is_note(key: str) -> bool:
    """Return whether a keyword is an annotation, by its name or because no keyword has that name."""
    return key not in _MEANT


def _is_plain(key: str, schema: dict[str, Any], types: set[str]) -> bool:
    value = schema[key]
    if key in ("enum", "const"):
        return all(_is_plain_value(each, types) for each in (value if key == "enum" else [value]))
    if (types or _TYPES).isdisjoint(TYPES_OF_KEYWORD.get(key, ())):
        return False
    match key:
        case "properties" | "items":
            return isinstance(value, dict) or value is True
        case "additionalProperties":
            return isinstance(value, dict | bool)
        case "required":
            return isinstance(value, list) and schema.get("properties", {}).keys() >= {*value}
        case "format":
            return value not in CHECKED_FORMATS and (value not in EXACT_PATTERNS or "pattern" not in schema)
        case "pattern":
            return isinstance(value, str) and not ends_in_escape(value) and make_safe(read_ecma(value)) is not None
        case "uniqueItems":
            return value is False
    is_count = isinstance(value, int) and not isinstance(value, bool)
    return (key in _COUNTS and is_count) or (key in NUMERIC_BOUNDS and is_count and abs(value) < MAX_BOUND)


def _is_plain_value(value: Any, types: set[str]) -> bool:
    """Return whether a listed value has one spelling, which llguidance writes."""
    if isinstance(value, str):
        return LONG_ESCAPED.isdisjoint(value) and types <= {"string", "null"}
    if isinstance(value, bool) or value is None:
        return not types
    return isinstance(value, int) and types == {"integer"} and abs(value) < MAX_BOUND
