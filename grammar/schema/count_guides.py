"""Guides for propertyNames, contains, minProperties, maxProperties, uniqueItems and bounds of integers."""

import json
import math
import re
from collections.abc import Callable
from fractions import Fraction
from itertools import combinations, pairwise
from typing import Any

from ..errors import InvalidGrammar
from ..validator import SchemaValidator
from .dialect import DRAFT_2020
from .emit import write_for_validator
from .node import Node, Schema, iterate_nodes, list_properties
from .rules import types_of

# Combinations that a guide may list.
MAX_NUM_CHOICES = 20
# Characters of JSON that a guide may spend on copies of the `contains` schema.
MAX_NUM_REPEATED = 4096
MAX_NUM_VALUES = 64
# Integers of a range that are validated one by one; takes about 1 ms.
MAX_NUM_TRIED = 1024
MAX_DEPTH = 4
# Doubles represent all integers up to this one exactly.
MAX_EXACT = 2**53
TYPES = ("object", "array", "string", "number", "boolean", "null")
Guide = Node | None


def make(**keywords: Any) -> Node:
    """Return a schema that no user wrote."""
    return Node("", keywords)


def guide_names(node: Node, names: Schema) -> Guide:
    """Forbid properties whose names `propertyNames` rejects; if it enumerates names, forbid all other names."""
    if names is False:
        return make(maxProperties=0)
    if not isinstance(names, Node):
        return None
    validator = make_validator(names)
    if validator is None:
        return None
    listed = dict.fromkeys([*list_properties(node), *node.get("required", [])])
    properties: dict[str, Schema] = {name: False for name in listed if not validator.is_valid(name)}
    values = list_values(names)
    if values is None and "string" not in list_types(names):
        values = []
    if values is None:
        return make(properties=properties) if properties else None
    properties = {**{name: validator.is_valid(name) for name in list_properties(node)}, **properties}
    fine = [value for value in values if isinstance(value, str) and validator.is_valid(value)]
    others = [value for value in fine if value not in properties]
    guide = make(properties=properties, additionalProperties=False)
    if others:
        guide.keywords["patternProperties"] = {f"^(?:{'|'.join(map(re.escape, others))})$": True}
    return guide


def guide_contains(node: Node, wanted: Schema) -> Guide:
    """Enumerate the positions of the `minContains` items that match `contains`, if `maxItems` bounds them."""
    least, most = node.get("minContains", 1), node.get("maxItems")
    if not least:
        return None
    if most is not None and most < least:
        return exclude("array")
    if most is None or most > MAX_NUM_CHOICES:
        return make(minItems=least)
    # Count the combinations before listing them: listing very many would hold the GIL.
    num_choices = math.comb(most, least)
    size = len(json.dumps(write_for_validator(wanted))) if num_choices <= MAX_NUM_CHOICES else 0
    if num_choices > MAX_NUM_CHOICES or num_choices * least * size > MAX_NUM_REPEATED:
        return make(minItems=least)
    branches = [
        make(
            prefixItems=[wanted if place in choice else True for place in range(choice[-1] + 1)],
            minItems=choice[-1] + 1,
        )
        for choice in combinations(range(most), least)
    ]
    return make(anyOf=branches)


def guide_number(node: Node, keyword: str) -> Guide:
    """Enumerate which properties of a closed object are present (minProperties) or absent (maxProperties)."""
    names, number = list(list_properties(node)), node.keywords[keyword]
    if keyword == "maxProperties" and number == 0:
        return make(properties=dict.fromkeys(names, False), additionalProperties=False)
    if node.get("additionalProperties") is not False or node.get("patternProperties"):
        return None
    if keyword == "minProperties" and number > len(names):
        return exclude("object")
    size = number if keyword == "minProperties" else len(names) - number
    if not 0 <= size <= len(names) <= MAX_NUM_CHOICES or math.comb(len(names), size) > MAX_NUM_CHOICES:
        return None
    chosen = combinations(names, size)
    if keyword == "minProperties":
        return make(anyOf=[make(required=list(choice)) for choice in chosen])
    return make(anyOf=[make(properties=dict.fromkeys(choice, False)) for choice in chosen])


def guide_distinct(node: Node) -> Guide:
    """Limit an array of distinct items to the number of values that the items can have."""
    count = count_values(node.get("items"), MAX_DEPTH)
    return None if count is None else make(maxItems=len(node.get("prefixItems", ())) + count)


def count_values(schema: Any, depth: int) -> int | None:
    """Return an upper bound of the number of values a schema allows, None if it is large or unknown."""
    if not isinstance(schema, Node) or not depth:
        return None
    values = list_values(schema)
    if values is not None:
        return len(values)
    kind = schema.get("type")
    if kind in ("boolean", "null"):
        return 2 if kind == "boolean" else 1
    if kind in ("integer", "number"):
        return count_multiples(schema)
    if "anyOf" in schema.keywords:
        counts = [count_values(branch, depth - 1) for branch in schema.keywords["anyOf"]]
        return None if None in counts else sum(count or 0 for count in counts)
    if kind != "object" or schema.get("patternProperties") or "$ref" in schema.keywords:
        return None
    if schema.get("maxProperties") == 0:
        return 1
    if schema.get("additionalProperties") is not False:
        return None
    count, required = 1, schema.get("required", [])
    for name, part in list_properties(schema).items():
        found = count_values(part, depth - 1)
        if found is None or count > MAX_NUM_VALUES:
            return None
        count *= found + (name not in required)
    return count if count <= MAX_NUM_VALUES else None


def count_multiples(node: Node) -> int | None:
    """Return an upper bound of the number of multiples between the node's bounds, None if large or unknown."""
    step = node.get("multipleOf", 1 if node.get("type") == "integer" else 0)
    low = node.get("minimum", node.get("exclusiveMinimum"))
    high = node.get("maximum", node.get("exclusiveMaximum"))
    if not step or low is None or high is None or max(abs(low), abs(high), step) > MAX_EXACT:
        return None
    # Use the decimal digits: as doubles, 0.3 / 0.1 is less than 3.
    low, high, step = (Fraction(str(number)) for number in (low, high, step))
    if (high - low) / step >= MAX_NUM_VALUES:
        return None
    return max(math.floor(high / step) - math.ceil(low / step) + 1, 0)


def guide_integers(node: Node) -> Guide:
    """Enumerate the integers that satisfy a schema: between its bounds, near its one bound, or near 0."""
    typed = [node] if "type" in node.keywords else node.get("oneOf", [])
    types = {name for part in typed for name in list_types(part)}
    if "integer" not in types or "number" in types or has_reference(node):
        return None
    low, high = find_bound(node, "minimum", math.ceil), find_bound(node, "maximum", math.floor)
    # Without a bound the model can always add digits, so values beyond this range need no check.
    first = low if low is not None else (0 if high is None else high) - MAX_NUM_VALUES + 1
    last = high if high is not None else first + 2 * MAX_NUM_VALUES
    if last - first >= MAX_NUM_TRIED:
        return None
    validator = make_validator(node)
    if validator is None:
        return None
    values = [value for value in range(first, last + 1) if validator.is_valid(value)]
    parts = list_runs(values)
    if len(parts) > MAX_NUM_CHOICES:
        if len(values) > 2 * MAX_NUM_VALUES:
            return None
        parts = [make(enum=values)]
    parts += [make(type="integer", maximum=first - 1)] if low is None else []
    parts += [make(type="integer", minimum=last + 1)] if high is None else []
    parts += [make(type=sorted(types - {"integer"}))] if len(types) > 1 else []
    return make(anyOf=parts) if parts else exclude("number")


def make_validator(schema: Schema) -> SchemaValidator | None:
    """Return the validator of a schema, None if the library does not support a pattern in it."""
    try:
        return SchemaValidator(write_for_validator(schema), dialect=DRAFT_2020)
    except InvalidGrammar:
        return None


def has_reference(node: Node) -> bool:
    """Tell whether a node refers to others; what they say is not repeated in a guide."""
    return any("$ref" in each.keywords for each in iterate_nodes([node]))


def list_types(schema: Any) -> list[str]:
    """Return the types that a schema lists, or all types if it lists none."""
    found = schema.get("type", TYPES) if isinstance(schema, Node) else TYPES
    return [found] if isinstance(found, str) else list(found)


def list_runs(values: list[int]) -> list[Node]:
    """Return a schema for each run of consecutive integers in a sorted list."""
    starts = [place for place, value in enumerate(values) if place == 0 or value > values[place - 1] + 1]
    runs = [(values[start], values[end - 1]) for start, end in pairwise([*starts, len(values)])]
    return [make(type="integer", minimum=low, maximum=high) for low, high in runs]


def find_bound(node: Node, keyword: str, make_whole: Callable[[float], int]) -> int | None:
    """Return the node's integer bound, None if it has none. An exclusive bound is returned as if inclusive."""
    names = (keyword, "exclusive" + keyword.capitalize())
    bounds = [node.keywords[name] for name in names if name in node.keywords]
    if not bounds or max(map(abs, bounds)) > MAX_EXACT:
        return None
    whole = map(make_whole, bounds)
    return max(whole) if keyword == "minimum" else min(whole)


def exclude(kind: str) -> Node:
    """Return the schema of all types but one."""
    return make(type=[name for name in TYPES if name != kind])


def list_values(schema: Any) -> list[Any] | None:
    """Return the value of `const`, or the `enum` values that a single `type` allows; None if it has neither."""
    if not isinstance(schema, Node):
        return None
    if "const" in schema.keywords:
        return [schema.keywords["const"]]
    values = schema.get("enum")
    types = schema.get("type")
    if not isinstance(values, list):
        return None
    return [value for value in values if types is None or isinstance(types, list) or types in types_of(value)]
