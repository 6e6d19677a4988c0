"""Arguments that a model writes one by one, each with its name, instead of as one JSON object."""

import json
import re
from collections.abc import Mapping
from typing import Any

from ..errors import UnsupportedGrammar
from ..schema.keywords import IN_PLACE_APPLICATORS, TYPES_OF_KEYWORD, join_pointer
from ..schema.rules import GROUNDED
from .structural_tag import make_choice, make_const, make_optional, make_sequence, make_tag

Json = dict[str, Any]

# Keywords that assert something about an object or a string; any other is an annotation, whatever its name.
_ALWAYS = IN_PLACE_APPLICATORS - {"then", "else"} | {"enum", "const", GROUNDED}
_OF_OBJECTS, _OF_STRINGS = (
    _ALWAYS | {keyword for keyword, types in TYPES_OF_KEYWORD.items() if kind in types}
    for kind in ("object", "string")
)
# The names alone decide what is written for these: only names in `properties` are.
_NAMED = frozenset(["properties", "required", "additionalProperties", "unevaluatedProperties"])
_NAME = re.compile(r"[\w.$@-]+")
_ROOT = "urn:troupe:arguments"
_PYTHON: Mapping[str, tuple[str, ...]] = {"boolean": ("True", "False"), "null": ("None",)}


def list_raw(schema: Mapping[str, Any], parameter: str) -> frozenset[str]:
    """Return the names of the arguments that are written as text; any other is JSON.

    Only strings are written as text, which has no type. Strings with further keywords are JSON, which enforces them.

    Args:
        parameter: how one is written, with {key} and {value}.
    """
    end = parameter.partition("{value}")[2].rstrip()
    properties = schema.get("properties", {}) if end else {}
    return frozenset(name for name, child in properties.items() if _is_raw(child, end))


def _is_raw(schema: Any, end: str) -> bool:
    if not isinstance(schema, Mapping) or schema.get("type") != "string":
        return False
    texts = schema.get("enum", [])
    return schema.keys() & _OF_STRINGS <= {"enum"} and all(isinstance(each, str) and end not in each for each in texts)


def write_parameters(schema: Mapping[str, Any], parameter: str, separator: str, place: str) -> Json:
    """Return the format of the arguments in the order of the schema; those that it does not name are not written.

    Args:
        parameter: how one is written, with {key} and {value}; "{key}={value}" has Python's True, False and None.
        place: pointer to the schema, for errors.

    Raises:
        UnsupportedGrammar: a keyword would have to be enforced over all arguments together.
    """
    properties, required = schema.get("properties", {}), schema.get("required", [])
    for keyword in schema:
        if keyword in _OF_OBJECTS - _NAMED and not _is_idle(keyword, schema):
            raise UnsupportedGrammar(place, keyword, "this model writes arguments one by one")
    if any(name not in properties for name in required):
        raise UnsupportedGrammar(
            place, "required", "this model writes only arguments that the properties list"
        )
    items = []
    for name, child in properties.items():
        if child is False and name not in required:
            continue
        before, _, after = parameter.partition("{value}")
        if _NAME.fullmatch(name) is None:
            pointer = join_pointer(f"{place}/properties", name)
            raise UnsupportedGrammar(pointer, "properties", f"this model writes no argument named {name!r}")
        item = _write_one(before.replace("{key}", name), child, after, schema, name)
        items.append((item, name in required))
    return _join(items, separator)


def _is_idle(keyword: str, schema: Mapping[str, Any]) -> bool:
    """Return whether a keyword of all arguments holds for any that are written."""
    value = schema[keyword]
    if keyword == "minProperties":
        return bool(value <= len(set(schema.get("required", ()))))
    if keyword == "maxProperties":
        return bool(value >= len(schema.get("properties", {})))
    if keyword == "if":
        return not {"then", "else"} & schema.keys()
    is_map = keyword in ("dependencies", "dependentRequired", "dependentSchemas", "patternProperties")
    return value is True or (not value and (is_map or keyword == "propertyNames") and value is not False)


def _write_one(before: str, child: Any, after: str, root: Mapping[str, Any], name: str) -> Json:
    end = after.rstrip()
    only = [
        _PYTHON[kind] for kind in _PYTHON if not end and isinstance(child, dict) and child.get("type") == kind
    ]
    if only and _ALWAYS.isdisjoint(child):
        content = make_choice([make_const(text) for text in only[0]])
    elif end and _is_raw(child, end):
        texts = child.get("enum")
        content = {"type": "any_text"} if texts is None else make_choice([make_const(text) for text in texts])
    else:
        content = {"type": "json_schema", "json_schema": _extract(child, root, name)}
    tag = make_tag(before, content, end)
    return make_sequence(tag, make_const(after[len(end) :])) if after != end else tag


def _extract(child: Any, root: Mapping[str, Any], name: str) -> Any:
    """Return the schema of one argument as a document in which its references mean what they meant."""
    dialect = {"$schema": root["$schema"]} if "$schema" in root else {}
    if 'Ref": "' not in (written := json.dumps(child)) and '"$ref"' not in written:
        return dialect | child if isinstance(child, dict) else child
    document = {"$id": _ROOT, **root}
    path = join_pointer("#/properties", name)
    key = "definitions" if "definitions" in root else "$defs"
    return {**dialect, key: {"root": document}, "$ref": document["$id"].rstrip("#") + path}


def _join(items: list[tuple[Json, bool]], separator: str) -> Json:
    if not separator:
        parts = [item if is_needed else make_optional(item) for item, is_needed in items]
        return make_sequence(*parts) if parts else make_const("")
    ways = []
    for index, (first, is_needed) in enumerate(items):
        more = [(make_sequence(make_const(separator), item), needed) for item, needed in items[index + 1 :]]
        ways.append(make_sequence(first, *(item if needed else make_optional(item) for item, needed in more)))
        if is_needed:
            return make_choice(ways)
    return make_choice([*ways, make_const("")])
