"""Guides for propertyNames, contains and uniqueItems, and the values that a schema lists."""

import math
import re
from collections.abc import Iterable
from typing import Any

from ..errors import InvalidGrammar
from ..validator import SchemaValidator
from .dialect import DRAFT_2020
from .emit import write_for_validator
from .node import Node, Schema, list_properties
from .rules import TYPES, list_types, types_of

MAX_NUM_VALUES = 64
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


def guide_contains(node: Node) -> Guide:
    """Demand as many items as have to match `contains`."""
    least = node.get("minContains", 1)
    return exclude("array") if node.get("maxItems", least) < least else make(minItems=least) if least else None


def guide_distinct(node: Node) -> Guide:
    """Limit an array of distinct items to the number of values that the items can have."""
    values = list_values(node.get("items", True))
    return None if values is None else make(maxItems=len(node.get("prefixItems", ())) + len(values))


def make_validator(schema: Schema) -> SchemaValidator | None:
    """Return the validator of a schema, None if the library does not support a pattern in it."""
    try:
        return SchemaValidator(write_for_validator(schema), dialect=DRAFT_2020)
    except InvalidGrammar:
        return None


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
