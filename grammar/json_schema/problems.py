"""Keywords of a normalised schema that llguidance refuses or does not enforce exactly."""

from collections.abc import Iterator
from typing import Any

from ..plan import Problem
from .node import Node
from .patterns import make_safe

UNSUPPORTED_KEYWORDS = {
    "not": "exclusion is not enforced token by token",
    "if": "conditional schemas are not enforced token by token",
    "contains": "counting matching items is not enforced token by token",
    "uniqueItems": "distinct items are not enforced token by token",
    "dependencies": "demands that depend on another property are not enforced token by token",
    "dependentRequired": "demands that depend on another property are not enforced token by token",
    "dependentSchemas": "demands that depend on another property are not enforced token by token",
    "propertyNames": "only a single pattern without other property keywords is enforced",
    "unevaluatedItems": "only without $ref, allOf, anyOf and the like in the same schema",
    "unevaluatedProperties": "only without $ref, allOf, anyOf and the like in the same schema",
    "$dynamicAnchor": "dynamic references are not resolved",
    "$dynamicRef": "dynamic references are not resolved",
    "$recursiveRef": "dynamic references are not resolved",
}
PATTERN_REASON = (
    "one of its character classes would be read too loosely, or in another way than JSON Schema does"
)
_SUSPECTS = frozenset(UNSUPPORTED_KEYWORDS) | {
    *("x-grounded", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("pattern", "patternProperties", "minProperties"),
}
NUMERIC_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


def find_problems(node: Node) -> Iterator[Problem]:
    """Yield what stands in this one schema; subschemas are looked at on their own."""
    if _SUSPECTS.isdisjoint(node.schema):
        return
    for keyword, reason in UNSUPPORTED_KEYWORDS.items():
        if keyword in node.schema:
            yield Problem(node.pointer, node.original_name(keyword), reason)
    if node.schema.get("x-grounded") is True:
        yield Problem(node.pointer, "x-grounded", "it needs a source text to quote from")
    for keyword in NUMERIC_BOUNDS:
        value = node.schema.get(keyword)
        if isinstance(value, int) and not (is_exact(value) or is_clamped(node.schema, keyword, value)):
            reason = f"{value} has no exact binary floating point form, so the bound would shift"
            yield Problem(node.pointer, node.original_name(keyword), reason)
    if "pattern" in node.schema and make_safe(node.schema["pattern"]) is None:
        yield Problem(node.pointer, node.original_name("pattern"), PATTERN_REASON)
    if any(make_safe(pattern) != pattern for pattern in node.schema.get("patternProperties", ())):
        yield Problem(node.pointer, node.original_name("patternProperties"), PATTERN_REASON)
    if is_duplicate_prone(node.schema):
        reason = "names outside properties may repeat in the text, so their number is not enforced"
        yield Problem(node.pointer, "minProperties", reason)


def is_exact(value: int) -> bool:
    """Tell whether llguidance, which reads bounds as doubles, reads this one exactly."""
    try:
        return int(float(value)) == value
    except OverflowError:
        return False


def is_clamped(schema: dict[str, Any], keyword: str, value: int) -> bool:
    """Tell whether the bound lies beyond 64 bits, where llguidance allows fewer integers, never more."""
    if schema.get("type") != "integer":
        return False
    return value >= 2**63 - 1 if "aximum" in keyword else "inimum" in keyword and value <= -(2**63)


def is_duplicate_prone(schema: dict[str, Any]) -> bool:
    """Tell whether repeated names could make up a `minProperties` that distinct names have to.

    A generated text may repeat a name that the schema does not list; a parser keeps the last one.
    """
    required = schema.get("required", [])
    num_sure = max(len(set(required)) if isinstance(required, list) else 0, 1)
    is_open = schema.get("additionalProperties") is not False or "patternProperties" in schema
    return is_open and schema.get("minProperties", 0) > num_sure
