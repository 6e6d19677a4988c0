"""The texts that are valid under a schema, as a terminal of llguidance's Lark."""

import re
from collections.abc import Mapping
from typing import Any

from ..regex.text import quote, write_terminal
from ..schema.formats import ASSERTED_FORMATS, EXACT_PATTERNS
from ..schema.plain import is_note
from .arguments import find_types
from .free_text import ANY

Json = dict[str, Any]
NUMBERS = {
    "integer": r"/-?(?:0|[1-9][0-9]{0,19})/",
    "number": r"/-?(?:0|[1-9][0-9]{0,19})(?:\.[0-9]{1,20})?(?:[eE][-+]?[0-9]{1,2})?/",
}
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_RAW_FORMATS = {
    **EXACT_PATTERNS,
    "uuid": r"^[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$",
    "ipv4": rf"^(?:{_BYTE}\.){{3}}{_BYTE}$",
}
# What a pattern may have to be read alike in JSON Schema and by llguidance.
_PLAIN_PATTERN = re.compile(
    r"(?:[^\\^$|(.\[]|\[\^?(?:[^\]\[\\&~]|\\[\]\\^/.-])+\]|\\[.^$*+?()\[\]{}|/-]|\\d|\((?!\?)|\(\?:)*"
)


def list_keys(schema: Mapping[str, Any]) -> set[str]:
    return {key for key in schema if not is_note(key)}


# Keywords about all arguments together.
ASSERTING = frozenset(
    [
        *("minProperties", "maxProperties", "patternProperties", "propertyNames", "unevaluatedProperties"),
        *("dependencies", "dependentRequired", "dependentSchemas", "additionalProperties", "type", "anyOf"),
        *("if", "then", "else", "$dynamicRef", "$recursiveRef", "x-grounded"),
    ]
)


def split_types(schema: Any, is_string: bool = True) -> Any:
    """Return the part of a schema that is about strings, or about all other values."""
    if isinstance(schema, dict) and "anyOf" in schema and not any(_asserts_type(key) for key in schema):
        kept = [each for each in schema["anyOf"] if ("string" in find_types(each)) == is_string]
        if all(len(find_types(each) - {"string"}) == 0 or not is_string for each in kept):
            return {**schema, "anyOf": kept}
    types = find_types(schema) & {"string"} if is_string else find_types(schema) - {"string"}
    return {**(schema if isinstance(schema, dict) else {}), "type": sorted(types)}


def _asserts_type(key: str) -> bool:
    return key not in ("anyOf", "$defs", "definitions") and not is_note(key)


def write_body(schema: Any) -> str | None:
    """Return the terminal of the texts that are valid under a schema; "" for any text, None where a check decides."""
    if schema is True or schema == {}:
        return ""
    if not isinstance(schema, dict):
        return None
    keys = list_keys(schema)
    if not keys:
        return ""
    if keys == {"anyOf"}:
        bodies = [write_body(each) for each in schema["anyOf"]]
    elif keys == {"type"} and isinstance(schema["type"], list):
        bodies = [write_body({"type": kind}) for kind in schema["type"]]
    else:
        return _write_branch(schema, keys)
    if "" in bodies:
        return ""
    return None if None in bodies else " | ".join(f"({body})" for body in bodies)


def _write_branch(schema: Json, keys: set[str]) -> str | None:
    types = find_types(schema)
    if keys <= {"type", "enum", "const"} and {"enum", "const"} & keys and types == {"string"}:
        values = schema.get("enum", [schema.get("const")])
        return " | ".join(map(quote, values)) if "const" not in keys or "enum" not in keys else None
    if types == {"string"} and keys <= {"type", "minLength", "maxLength", "pattern", "format"}:
        return _write_string_body(schema)
    if keys == {"type"} and types <= {"boolean", "null"}:
        words = ("true", "True", "false", "False") if types == {"boolean"} else ("null", "None")
        return " | ".join(map(quote, words))
    return NUMBERS.get(str(schema.get("type"))) if keys == {"type"} else None


def _write_string_body(schema: Json) -> str | None:
    parts = []
    if "maxLength" not in schema and list_keys(schema) == {"type", "minLength"}:
        return None  # a check of free text has quicker masks, and any text can get longer
    if "minLength" in schema or "maxLength" in schema:
        least, most = int(schema.get("minLength", 0)), schema.get("maxLength", "")
        parts.append(f"/(?s:.{{{least},{int(most) if most != '' else ''}}})/")
    if "format" in schema and schema["format"] in _RAW_FORMATS:
        parts.append(write_terminal(_RAW_FORMATS[schema["format"]][1:-1]))
    elif schema.get("format") in ASSERTED_FORMATS:
        return None
    if "pattern" in schema:
        pattern = schema["pattern"]
        is_begun, is_ended = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
        inside = pattern[is_begun : len(pattern) - is_ended]
        if _PLAIN_PATTERN.fullmatch(inside) is None:
            return None
        body = write_terminal(inside.replace(r"\d", "[0-9]")) if inside else '""'
        parts.append(" ".join([*([] if is_begun else [ANY]), body, *([] if is_ended else [ANY])]))
    return " & ".join(f"({part})" for part in parts)
