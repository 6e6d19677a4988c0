"""Which schemas xgrammar enforces exactly: an allow-list, since what it drops it drops silently."""

from typing import Any

from ..plan import Problem
from .keywords import STRUCTURE_KEYWORDS, iterate_children, join_pointer, list_properties
from .refusal import iterate_inside_out
from .rules import types_of

# Per type, the keywords that may stand together; measured one by one and by random walks.
_ALLOWED: dict[str, frozenset[str]] = {
    "object": frozenset(["properties", "required", "additionalProperties", "minProperties", "maxProperties"]),
    "array": frozenset(["items", "minItems", "maxItems"]),
    # Not the length keywords: with them raw control characters are let into the string.
    "string": frozenset(),
    "integer": frozenset(["minimum", "maximum"]),
    "number": frozenset(),
    "boolean": frozenset(),
    "null": frozenset(),
}
_ANNOTATIONS = frozenset(
    ["title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly"]
)
# Optional properties of objects whose number is bounded: with 30 it takes seconds.
MAX_NUM_COUNTED = 20


def find_obstacle(schema: dict[str, Any] | bool, pointer: str = "") -> Problem | None:
    """Return the first thing in a normalised schema that xgrammar may not enforce, or None."""
    if isinstance(schema, bool):
        return Problem(pointer, "schema", "xgrammar takes no boolean schemas") if not schema else None
    for keyword, reason in find_local(schema):
        return Problem(pointer, keyword, reason)
    for path, child in iterate_children(schema):
        if path == ("additionalProperties",) and child is False:
            continue
        obstacle = find_obstacle(child, join_pointer(pointer, *path))
        if obstacle is not None:
            return obstacle
    return None


def is_quick(schema: dict[str, Any]) -> bool:
    """Tell whether xgrammar counts the properties of all objects in a schema in a fraction of a second."""
    num_counted = 0
    for _, each in iterate_inside_out(schema):
        if each.keys() & {"minProperties", "maxProperties"}:
            num_counted += len(list_properties(each).keys() - set(each.get("required", [])))
    return num_counted <= MAX_NUM_COUNTED


def find_local(schema: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (keyword, reason) of what stands in this one schema."""
    if "$ref" in schema and not (schema["$ref"] == "#" or schema["$ref"].startswith("#/")):
        return [("$ref", "xgrammar follows only JSON pointers")]
    if "%" in schema.get("$ref", ""):
        return [("$ref", "xgrammar does not read the escapes of a URI")]
    for keyword in ("enum", "const"):
        if keyword in schema and has_wide_number(schema[keyword]):
            return [(keyword, "xgrammar reads whole numbers in 64 bits")]
    keywords = schema.keys() - _ANNOTATIONS - STRUCTURE_KEYWORDS
    if "type" in keywords and is_listed_by_type(schema):
        keywords = keywords - {"type"}
    if not keywords or keywords in ({"anyOf"}, {"$ref"}, {"enum"}, {"const"}):
        return []
    kind = schema.get("type")
    if not isinstance(kind, str) or kind not in _ALLOWED:
        return [(min(keywords), "xgrammar enforces keywords only beside a single type")]
    foreign = sorted(keywords - {"type"} - _ALLOWED[kind])
    if foreign:
        return [(foreign[0], "xgrammar drops or distorts it")]
    for bound in ("minimum", "maximum"):
        value = schema.get(bound, 0)
        if not isinstance(value, int) or not -(2**63) <= value < 2**63:
            return [(bound, "xgrammar takes only bounds that are integers of 64 bits")]
    if kind != "object":
        return []
    properties = schema.get("properties", {})
    if set(schema.get("required", [])) - properties.keys():
        return [("required", "xgrammar drops names that are not in properties")]
    if schema.get("additionalProperties", True) is not False:
        # Repeated names and the order of names are beyond it.
        return [("additionalProperties", "xgrammar counts repeated names as different ones")]
    return []


def has_wide_number(value: Any) -> bool:
    """Tell whether a whole number beyond 64 bits is in a value."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return any(map(has_wide_number, value))
    return isinstance(value, int | float) and not -(2**63) <= value < 2**63


def is_listed_by_type(schema: dict[str, Any]) -> bool:
    """Tell whether all listed values are of the type beside them, which xgrammar does not look at then."""
    values = [schema["const"]] if "const" in schema else schema.get("enum", [])
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return bool(values) and all(types_of(value) & set(kinds) for value in values)
