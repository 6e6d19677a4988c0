"""Property names that a schema does not list: where a text may hold them, and what strings may then hold.

llguidance 1.9 takes any `\\uXXXX` in a name that is not listed, whatever its options say. A name that is listed, or
that a pattern speaks about, could so be written again with a value of another schema. Without that escape every
string has one spelling, and a schema that uses it for something else, which is a control character without a short
escape, is refused.
"""

import re
from collections.abc import Iterator
from typing import Any

from ..plan import Problem
from ..regex.syntax import CharSet, ClassScanner, UnknownSyntax
from .keywords import join_pointer

# Characters that llguidance writes only as \uXXXX in JSON strings.
LONG_ESCAPED = frozenset(map(chr, {*range(0x20), 0x7F} - set(map(ord, "\b\f\n\r\t"))))
REASON = (
    "it takes a control character without a short escape, which is not written where other names are allowed"
)
# Matches the JSON text of schemas that may mention such a character; most schemas do not.
SIGNS = re.compile(r"\\u00|\x7f|\\\\[acuvx0]")
_NAMING = (("properties", dict), ("patternProperties", dict), ("required", list))
_CONTAINERS = (dict, list)


def has_open_names(document: Any) -> bool:
    """Return whether an object may have both listed names and other names.

    Checks every object in the document, schema or not: a reference may lead anywhere.
    """
    pending = [document]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            if is_open(node):
                return True
            node = node.values()
        pending.extend([child for child in node if isinstance(child, _CONTAINERS)])
    return False


def is_open(schema: dict[str, Any]) -> bool:
    """Return whether this schema lists some names and allows others."""
    if schema.get("additionalProperties") is False and "patternProperties" not in schema:
        return False
    return any(schema.get(keyword) and isinstance(schema[keyword], kind) for keyword, kind in _NAMING)


def find_long_escapes(value: Any, pointer: str = "") -> Iterator[Problem]:
    """Yield the values and patterns in a schema that no text without `\\uXXXX` satisfies."""
    if isinstance(value, list):
        for index, child in enumerate(value):
            yield from find_long_escapes(child, join_pointer(pointer, index))
    if not isinstance(value, dict):
        return
    for keyword in ("const", "enum"):
        if keyword in value and has_long_escape(value[keyword]):
            yield Problem(pointer, keyword, REASON)
    if isinstance(value.get("pattern"), str) and is_long_escaped(value["pattern"]):
        yield Problem(pointer, "pattern", REASON)
    for name, child in value.items():
        yield from find_long_escapes(child, join_pointer(pointer, name))


def has_long_escape(value: Any) -> bool:
    """Tell whether a string in a value needs such an escape; names of properties are written as they are."""
    if isinstance(value, str):
        return not LONG_ESCAPED.isdisjoint(value)
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(map(has_long_escape, children))


def is_long_escaped(pattern: str) -> bool:
    """Tell whether a part of a pattern matches nothing but such characters."""
    try:
        return any(is_all_long(char_set) for _, char_set in ClassScanner(pattern).scan())
    except UnknownSyntax:
        return False


def is_all_long(char_set: CharSet) -> bool:
    """Tell whether a set has members, all of which need such an escape."""
    if any(high > 0x7F for _, high in char_set.ranges):
        return False
    codes = [code for low, high in char_set.ranges for code in range(low, high + 1)]
    return bool(codes) and LONG_ESCAPED.issuperset(map(chr, codes))
