"""Keywords of a normalised schema that llguidance refuses or does not enforce exactly."""

import sys
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
    *("pattern", "patternProperties", "minProperties", "enum", "const"),
}
# Beyond are the last doubles below 2**63.
MAX_COUNTED = 2**63 - 1024
# Below it a double tells each integer from its neighbours.
MAX_BOUND = 2**53
# 10**22 is the last power of ten that a double holds.
MAX_EXPONENT = 22
INEXACT = "that 64 bits or a double do not hold exactly, so it would shift"
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
        if isinstance(value, int | float) and not is_exact_bound(value):
            yield Problem(node.pointer, node.original_name(keyword), f"{value} is a bound {INEXACT}")
    for keyword in ("enum", "const"):
        if keyword in node.schema and (inexact := find_inexact(node.schema[keyword])) is not None:
            yield Problem(node.pointer, node.original_name(keyword), f"{inexact} is {INEXACT}")
    if "pattern" in node.schema and make_safe(node.schema["pattern"]) is None:
        yield Problem(node.pointer, node.original_name("pattern"), PATTERN_REASON)
    if any(make_safe(pattern) != pattern for pattern in node.schema.get("patternProperties", ())):
        yield Problem(node.pointer, node.original_name("patternProperties"), PATTERN_REASON)
    if is_duplicate_prone(node.schema):
        reason = "names outside properties may repeat in the text, so their number is not enforced"
        yield Problem(node.pointer, "minProperties", reason)


def is_exact(value: int | float) -> bool:
    """Tell whether llguidance, which reads numbers as doubles and counts in 64 bits, reads this one exactly.

    At the ends of 64 bits it lets other integers through, and ends the process over some negative ones.
    """
    return abs(value) < MAX_COUNTED and (
        is_read_exactly(value) if isinstance(value, float) else int(float(value)) == value
    )


def is_exact_bound(value: int | float) -> bool:
    """Tell whether llguidance, which calculates with bounds as doubles, keeps this one where it is."""
    return abs(value) < MAX_BOUND and is_exact(value)


def is_read_exactly(value: float) -> bool:
    """Tell whether llguidance reads this double from its text: it multiplies all digits by a power of ten.

    Where a double does not hold both, it reads one next to it: 102.79329386273996 for 102.79329386273997.
    """
    digits, _, power = repr(abs(value)).partition("e")
    whole, _, fraction = digits.partition(".")
    number = int(whole + fraction)
    return int(float(number)) == number and abs(int(power or 0) - len(fraction)) <= MAX_EXPONENT


def find_inexact(value: Any) -> int | float | None:
    """Return the first number in a value that llguidance does not read exactly."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return next((found for found in map(find_inexact, value) if found is not None), None)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and not is_exact(value) else None


def is_beyond_doubles(value: Any) -> bool:
    """Tell whether a number in a value is larger than any double."""
    if isinstance(value, dict | list):
        return any(map(is_beyond_doubles, value.values() if isinstance(value, dict) else value))
    return isinstance(value, int) and abs(value) > sys.float_info.max


def is_duplicate_prone(schema: dict[str, Any]) -> bool:
    """Tell whether repeated names could make up a `minProperties` that distinct names have to.

    A generated text may repeat a name that the schema does not list; a parser keeps the last one.
    """
    required = schema.get("required", [])
    num_sure = max(len(set(required)) if isinstance(required, list) else 0, 1)
    is_open = schema.get("additionalProperties") is not False or "patternProperties" in schema
    return is_open and schema.get("minProperties", 0) > num_sure
