"""Guides: consequences of a keyword that is left to residual checks, expressed in keywords that an engine enforces.

A guide holds for every valid instance, so adding it to a weakened schema excludes none. It makes dead ends rarer:
places where the check allows no continuation. It may be weaker than the keyword, because the check remains.
"""

from typing import Any

from ..regex.assertions import find_guides as find_patterns
from .count_guides import (
    TYPES,
    guide_contains,
    guide_distinct,
    guide_integers,
    guide_names,
    guide_number,
    list_types,
    list_values,
    make,
)
from .keywords import TYPES_OF_KEYWORD
from .node import Node, Schema, list_properties
from .rules import allowed_types, types_of

MAX_NUM_GUIDES = 4
# Bound -> the bound that holds for exactly the numbers that violate it.
_OPPOSITES = {
    "minimum": "exclusiveMaximum",
    "maximum": "exclusiveMinimum",
    "exclusiveMinimum": "maximum",
    "exclusiveMaximum": "minimum",
}
Guide = Node | None


def find_guides(node: Node, keyword: str) -> list[Node]:
    """Return schemas that follow from one keyword of a node."""
    value = node.keywords[keyword]
    found: list[Guide] = []
    if keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
        found = [guide_dependency(node, name, demand) for name, demand in value.items()]
    elif keyword == "not":
        found = [guide_integers(node) or guide_condition(node, value, False, True), guide_types(node, value)]
    elif keyword == "oneOf":
        found = [guide_integers(node)]
    elif keyword == "if":
        then, other = node.get("then", True), node.get("else", True)
        found = [guide_integers(node) or guide_condition(node, value, then, other)]
    elif keyword == "pattern":
        found = [make(pattern=pattern) for pattern in find_patterns(value) if pattern != value]
    elif keyword == "uniqueItems":
        found = [guide_distinct(node)]
    elif keyword == "propertyNames":
        found = [guide_names(node, value)]
    elif keyword == "contains":
        found = [guide_contains(node, value)]
    elif keyword in ("minProperties", "maxProperties"):
        found = [guide_number(node, keyword)]
    return [guide for guide in found if guide is not None][:MAX_NUM_GUIDES]


def guide_dependency(node: Node, name: str, demand: Any) -> Guide:
    """Either the property is absent, or the properties that it requires are present or its schema is satisfied."""
    absent = make(properties={name: False})
    if isinstance(demand, list):
        is_known = is_listed(node, {name, *demand})
        return make(anyOf=[absent, make(required=demand)]) if is_known else None
    if not is_listed(node, {name}):
        return None
    return make(anyOf=[absent, make(allOf=[make(required=[name]), demand])])


def guide_types(node: Node, excluded: Schema) -> Guide:
    """Handle `not` with a schema that all values of some types satisfy: the value must have another type."""
    own, taken = list_types(node), {kind for each in list_branches(excluded) for kind in list_satisfied(each)}
    # Every integer is a number.
    left = [kind for kind in own if kind not in taken and not (kind == "integer" and "number" in taken)]
    return None if left == own else make(type=left) if left else make(allOf=[False])


def list_branches(excluded: Schema) -> list[Node]:
    """Return the schemas in a `not` of which a value must satisfy none."""
    branches: list[Schema] = [excluded]
    if isinstance(excluded, Node) and excluded.keywords.keys() == {"anyOf"}:
        branches = excluded.keywords["anyOf"]
    return [make() if branch is True else branch for branch in branches if branch is not False]


def list_satisfied(node: Node) -> set[str]:
    """Return the types whose values all satisfy a schema."""
    keywords, types = node.keywords.keys() - {"type"}, set(list_types(node))
    if keywords == {"anyOf"}:
        branches = list_branches(make(anyOf=node.keywords["anyOf"]))
        return types & {kind for branch in branches for kind in list_satisfied(branch)}
    if not keywords <= TYPES_OF_KEYWORD.keys():
        return set()
    return types - {kind for keyword in keywords for kind in TYPES_OF_KEYWORD[keyword]}


def guide_condition(node: Node, condition: Schema, then: Schema, other: Schema) -> Guide:
    """Handle `if` on the presence of one property, or on its value if the schema lists the values."""
    if not isinstance(condition, Node):
        return None
    names = only_required(condition)
    if names and len(names) == 1 and is_listed(node, names):
        (name,) = names
        absent, present = make(properties={name: False}), make(required=[name])
        return make(anyOf=[make(allOf=[absent, other]), make(allOf=[present, then])])
    return guide_value(node, condition, then, other)


def guide_value(node: Node, condition: Node, then: Schema, other: Schema) -> Guide:
    """Handle `if` on one property's value: a list of values, or bounds of a number."""
    properties = list_properties(condition)
    names = set(properties)
    if condition.keywords.keys() - {"required"} != {"properties"} or len(names) != 1:
        return None
    if not is_listed(node, names) or not names >= set(condition.get("required", [])):
        return None
    (name,) = names
    # Here an unlisted name stands for no property.
    listed = list_properties(node).get(name, False)
    parts = [make()] if listed is False else split_values(properties[name], listed)
    branches = [
        make(allOf=[make(properties={name: part}, required=[name]), demand])
        for part, demand in zip(parts, (then, other), strict=False)
    ]
    absent = other if condition.get("required") else then
    branches.append(make(allOf=[make(properties={name: False}), absent]))
    return make(anyOf=branches) if parts else None


def split_values(condition: Schema, listed: Schema) -> list[Node]:
    """Return schemas of the values of a property that satisfy a condition and, if any, of those that do not.

    Returns [] if these keywords cannot express it.
    """
    if not isinstance(condition, Node) or not isinstance(listed, Node):
        return []
    if condition.keywords.keys() == {"not"}:
        parts = split_values(condition.keywords["not"], listed)
        return parts[::-1] if len(parts) == 2 else []
    kind, keywords = listed.get("type"), condition.keywords.keys() - {"type"}
    types = allowed_types(condition)
    if keywords and keywords <= _OPPOSITES.keys():
        return split_bounds({name: condition.keywords[name] for name in keywords}, types, listed)
    if not keywords and types:
        return split_types(types)
    if keywords not in ({"enum"}, {"const"}):
        return []
    listing = condition.get("enum", [condition.get("const")])
    meant = [value for value in listing if types is None or types & types_of(value)]
    if meant and all(value is None for value in meant):
        return split_types({"null"})
    possible = [True, False] if kind == "boolean" else list_values(listed)
    # Numbers have several spellings, and to Python 1 is True.
    if not meant or not possible or not all(isinstance(v, str | bool | None) for v in [*meant, *possible]):
        return []
    rest = [value for value in possible if value not in meant]
    return [make(enum=meant), make(enum=rest)] if rest else [make(enum=meant)]


def split_bounds(bounds: dict[str, Any], types: set[str] | None, listed: Schema) -> list[Node]:
    """Return schemas of the values of some types, numbers within bounds among them, and of all others."""
    if types is not None and "number" not in types:
        if "integer" not in types or may_be_fraction(listed):
            return []
        types = types - {"integer"} | {"number"}
    rest = [] if types is None else [name for name in TYPES if name not in types]
    beyond = [make(type="number", **{_OPPOSITES[name]: bounds[name]}) for name in bounds]
    within = make(**bounds) if types is None else make(type=sorted(types), **bounds)
    return [within, make(anyOf=[*beyond, make(type=rest)] if rest else beyond)]


def may_be_fraction(schema: Schema) -> bool:
    """Return whether a number with a fraction may satisfy a schema, judging by its types."""
    if not isinstance(schema, Node):
        return schema
    if "type" in schema.keywords:
        return "number" in list_types(schema)
    branches = schema.get("anyOf", schema.get("oneOf"))
    return branches is None or any(map(may_be_fraction, branches))


def split_types(types: set[str]) -> list[Node]:
    """Return schemas of the values of some types and of all others."""
    if "integer" in types:
        # No JSON Schema type covers exactly the numbers with a fraction.
        return []
    rest = [name for name in TYPES if name not in types]
    return [make(type=sorted(types)), make(type=rest)] if rest else []


def only_required(schema: Schema) -> set[str] | None:
    """Return the names that a schema requires; None if it has other keywords."""
    if not isinstance(schema, Node) or schema.keywords.keys() != {"required"}:
        return None
    return set(schema.keywords["required"])


def is_listed(node: Node, names: set[str]) -> bool:
    """Return whether a node lists these properties or allows no others, so that naming them changes no order."""
    is_closed = node.get("additionalProperties") is False and not node.get("patternProperties")
    return is_closed or names <= list_properties(node).keys()
