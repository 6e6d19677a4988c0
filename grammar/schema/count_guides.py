"""Guides for propertyNames, contains, minProperties, maxProperties and bounds of integers."""

import json
import math
import re
from collections.abc import Callable, Iterable
from itertools import combinations
from typing import Any

from ..errors import InvalidGrammar
from ..validator import SchemaValidator
from .dialect import DRAFT_2020
from .emit import write_for_validator
from .node import Node, Schema, iterate_nodes, list_properties
from .rules import TYPES, list_types, types_of

# Combinations that a guide may list.
MAX_NUM_CHOICES = 20
# Characters of JSON that a guide may spend on copies of the `contains` schema.
MAX_NUM_REPEATED = 4096
MAX_NUM_VALUES = 64
# Integers of a range that are validated one by one; takes about 1 ms.
MAX_NUM_TRIED = 1024
# Doubles represent all integers up to this one exactly.
MAX_EXACT = 2**53
Guide = Node | None


def make(**keywords: Any) -> Node:
    return Node("", keywords)


def guide_names(node: Node, names: Schema) -> Guide:
    """Forbid properties whose names `propertyNames` rejects; if it has a pattern or a list, also all other names."""
    if names is False:
        return make(maxProperties=0)
    validator = make_validator(names)
    if validator is None or not isinstance(names, Node):
        return None
    listed = dict.fromkeys([*list_properties(node), *node.get("required", [])])
    properties: dict[str, Schema] = {name: False for name in listed if not validator.is_valid(name)}
    values = list_values(names) if "string" in list_types(names) else []
    if values is None and "pattern" not in names.keywords:
        return make(properties=properties) if properties else None
    patterns = [names.get("pattern")]
    if values is not None:
        properties = {**dict.fromkeys(list_properties(node), True), **properties}
        fine = [value for value in values if isinstance(value, str) and validator.is_valid(value)]
        others = [re.escape(value) for value in fine if value not in properties]
        patterns = [f"^(?:{'|'.join(others)})$"] if others else []
    guide = make(properties=properties, additionalProperties=False)
    if patterns:
        guide.keywords["patternProperties"] = dict.fromkeys(patterns, True)
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
    values = list_values(node.get("items", True))
    return None if values is None else make(maxItems=len(node.get("prefixItems", ())) + len(values))


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
    validator = make_validator(node) if last - first < MAX_NUM_TRIED else None
    values = [value for value in range(first, last + 1) if validator is not None and validator.is_valid(value)]
    if validator is None or len(values) > 2 * MAX_NUM_VALUES:
        return None
    parts = [make(enum=values)] if values else []
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
    """Return whether a node refers to others, whose keywords a guide does not repeat."""
    return any("$ref" in each.keywords for each in iterate_nodes([node]))


def find_bound(node: Node, keyword: str, make_whole: Callable[[float], int]) -> int | None:
    """Return the node's integer bound, None if it has none. An exclusive bound is returned as if inclusive."""
    names = (keyword, "exclusive" + keyword.capitalize())
    bounds = [node.keywords[name] for name in names if name in node.keywords]
    if not bounds or max(map(abs, bounds)) > MAX_EXACT:
        return None
    whole = map(make_whole, bounds)
    return max(whole) if keyword == "minimum" else min(whole)


def exclude(kind: str) -> Node:
    return make(type=[name for name in TYPES if name != kind])


def list_choices(nodes: Iterable[Node]) -> list[Any] | None:
    """Return the few values that one of these schemas lists; None if none does, or the values are not all scalars."""
    found = [values for node in nodes if (values := list_values(node)) is not None]
    choices = min(found, key=len, default=[])
    is_few = 0 < len(choices) <= MAX_NUM_VALUES
    return choices if is_few and all(isinstance(value, str | int | None) for value in choices) else None


def list_values(schema: Schema) -> list[Any] | None:
    """Return the values that a schema lists, or that its type and bounds leave; None where it does not."""
    if not isinstance(schema, Node):
        return None
    kind, low, high = schema.get("type"), schema.get("minimum"), schema.get("maximum")
    values: list[Any] | None = None
    if "enum" in schema.keywords or "const" in schema.keywords:
        values = schema.get("enum", [schema.get("const")])
    elif kind in ("null", "boolean"):
        values = [None] if kind == "null" else [True, False]
    elif kind == "object" and schema.get("maxProperties") == 0:
        values = [{}]
    elif kind == "integer" and low is not None and high is not None:
        few = high - low < MAX_NUM_VALUES
        values = list(range(math.ceil(low), math.floor(high) + 1)) if few else None
    else:
        branches = [list_values(each) for each in schema.get("anyOf", schema.get("oneOf", ()))]
        if branches and None not in branches:
            values = [value for branch in branches for value in branch or ()]
    types = list_types(schema)
    return None if values is None else [value for value in values if types & types_of(value)]
