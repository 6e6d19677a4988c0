"""Arguments that a model writes one by one: which are text, and what a text means."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

from ..errors import GrammarError
from ..schema.keywords import iterate_objects, join_pointer, map_subschemas
from ..schema.plain import is_note
from ..schema.reader import REFERENCES
from ..schema.rules import TYPES, types_of
from ..validator import SchemaValidator
from .text_value import TextCheck, interpret, read_gemma, read_python, read_words
from .tool_styles import ToolStyle

Json = dict[str, Any]
Kind = Literal["text", "either", "other"]
KEY = r"([\w.$@-]{1,128})"
_ROOT = "urn:troupe:arguments"


def find_types(schema: Any) -> set[str]:
    """Return the types that a value may have, as far as the schema itself determines them."""
    if not isinstance(schema, Mapping):
        return set(TYPES)
    if "type" in schema:
        types = schema["type"]
        return {types} if isinstance(types, str) else set(types)
    if "anyOf" in schema:
        return set[str]().union(*map(find_types, schema["anyOf"]))
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return set(TYPES) if values is None else set[str]().union(*map(types_of, values))


def resolve(schema: Any, root: Mapping[str, Any]) -> Any:
    """Return what a schema that only refers to a definition means; any other schema as it is."""
    for _ in range(8):
        if not isinstance(schema, Mapping) or any(key != "$ref" and not is_note(key) for key in schema):
            break
        _, place, name = [*str(schema.get("$ref")).split("/", 2), "", ""][:3]
        found = root.get(place, {}).get(name) if place in ("$defs", "definitions") else None
        if found is None:
            break
        schema = found
    return schema


def find_kind(schema: Any, root: Mapping[str, Any]) -> Kind:
    """Return whether an argument is a text, is never one, or may be either."""
    types = find_types(resolve(schema, root))
    return "other" if "string" not in types else "text" if types == {"string"} else "either"


def extract(child: Any, root: Mapping[str, Any], name: str | None) -> Any:
    """Return the schema of one argument as a document in which its references mean what they meant.

    Args:
        name: of the property; None for the other arguments.
    """
    dialect = {"$schema": root["$schema"]} if "$schema" in root else {}
    if not isinstance(child, dict):
        return child
    if not any(key in each for each in iterate_objects(child) for key in REFERENCES):
        return dialect | child
    written = json.dumps(child)
    places = [place for place in ("$defs", "definitions") if isinstance(root.get(place), dict)]
    plain = sum(written.count(f'"$ref": "#/{place}/') for place in places) == written.count('ef": "')
    if plain and "$id" not in root and not any(key in written for key in ('"$id"', '"$anchor"')):
        return {**dialect, **{place: root[place] for place in places}, **child}
    document = {"$id": _ROOT, **root}
    path = "#/additionalProperties" if name is None else join_pointer("#/properties", name)
    key = "definitions" if "definitions" in root else "$defs"
    return {**dialect, key: {"root": document}, "$ref": document["$id"].rstrip("#") + path}


def strip_notes(schema: Any) -> Any:
    """Return a schema without annotations, so that equal schemas are compiled once."""
    if not isinstance(schema, dict):
        return schema
    return {
        key: map_subschemas(key, value, lambda _, each: strip_notes(each))
        for key, value in schema.items()
        if key == "$schema" or not is_note(key)
    }


@dataclass(frozen=True)
class ArgumentReader:
    """Reads the arguments of one tool that are written one by one.

    Attributes:
        schema: of all arguments.
    """

    style: ToolStyle
    schema: Mapping[str, Any]

    def _find(self, name: str) -> tuple[Any, str | None]:
        properties = self.schema.get("properties", {})
        if name in properties:
            return properties[name], name
        return self.schema.get("additionalProperties", True), None

    def find_kind(self, name: str) -> Kind:
        """Return the kind of an argument."""
        return find_kind(self._find(name)[0], self.schema) if self.style.writes_text else "other"

    def read(self, name: str, text: str) -> str:
        """Return the JSON of a whole argument."""
        if self.style.dialect == "gemma":
            value = read_gemma(text, self.style.quote)
        elif self.find_kind(name) == "either":
            child, own = self._find(name)
            value = interpret(text, make_predicate(json.dumps(extract(child, self.schema, own))))
        else:
            value = read_words(text) if self.style.dialect == "json" else read_python(text)
        return json.dumps(value, ensure_ascii=False)

    @cached_property
    def _ways(self) -> list[tuple[re.Pattern[str], str, bool]]:
        """The ways to write an argument: up to its value, behind it, and whether this one is for strings."""
        separator, found = f"(?:{re.escape(self.style.parameter_separator)})?", []
        for is_text in (True, False):
            before, _, after = self.style.find_parameter(is_text).partition("{value}")
            found.append((re.compile(separator + re.escape(before).replace(r"\{key\}", KEY)), after, is_text))
        return found

    def read_all(self, text: str) -> Json | None:
        """Return the arguments that a text consists of; None if it is not yet whole."""
        found: Json = {}
        at = 0
        while at < len(text):
            starts = ((*way, way[0].match(text, at)) for way in self._ways)
            before, after, is_first, start = next((way for way in starts if way[3] is not None), (None, "", True, None))
            if before is None or start is None:
                return None
            is_text = is_first if self.style.other_parameter else self.find_kind(start[1]) != "other"
            end = text.find(after.rstrip("\n"), start.end()) if is_text else find_json_end(text, start.end())
            if end < 0 or not text.startswith(after, end):
                return None
            written = text[start.end() : end]
            is_plain = is_text and (self.style.other_parameter or self.find_kind(start[1]) == "text")
            found[start[1]] = written if is_plain else json.loads(self.read(start[1], written))
            at = end + len(after)
        return found


def find_json_end(text: str, start: int) -> int:
    """Return where a JSON value, or a word of Python, ends; -1 if it does not."""
    word = re.compile(r"[-+.\w]+").match(text, start)
    if word is not None:
        return word.end()
    try:
        return json.JSONDecoder().raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return -1


@dataclass(frozen=True, slots=True)
class CallCheck(TextCheck):
    """The check of all arguments of a call together.

    Attributes:
        reader: of the arguments.
    """

    reader: ArgumentReader

    def find_end(self, text: bytes) -> int:
        """Return where the arguments end; their own text may contain what ends them."""
        at = text.find(self.end)
        while at >= 0 and self._read(text[:at]) is None:
            at = text.find(self.end, at + 1)
        return at

    def passes(self, text: bytes) -> bool:
        return self.validator.is_valid(self._read(text))

    def _read(self, text: bytes) -> Json | None:
        try:
            return self.reader.read_all(text.decode())
        except UnicodeDecodeError:
            return None


@lru_cache(256)
def make_predicate(document: str) -> Callable[[Any], bool]:
    """Return whether a value is valid under a schema; one that cannot be used takes anything."""
    try:
        return SchemaValidator(json.loads(document)).is_valid
    except GrammarError:
        return lambda value: True
