"""Guides: consequences of a keyword that is left to residual checks, expressed in keywords that an engine enforces.

A guide holds for every valid instance, so adding it to a weakened schema excludes none. It makes dead ends rarer:
places where the check allows no continuation. It may be weaker than the keyword, because the check remains.
"""

import json
import math
import re
from collections.abc import Iterable
from itertools import combinations
from typing import Any

from ..errors import InvalidGrammar
from ..regex.text import list_look_aheads, remove_assertions
from ..validator import SchemaValidator
from .dialect import DRAFT_2020
from .emit import write_for_validator
from .keywords import TYPES_OF_KEYWORD
from .node import Node, Schema, find_member, iterate_nodes, list_properties
from .rules import list_types, types_of

MAX_NUM_GUIDES = 4
MAX_NUM_VALUES = 64  # that a schema lists
MAX_NUM_BRANCHES = 3  # of a `oneOf` whose branches exclude each other
MAX_NUM_CHOICES = 20  # combinations that a guide lists
MAX_NUM_REPEATED = 4096  # characters of JSON in the copies of one `contains`
MAX_NUM_TRIED = 1024  # integers that are validated one by one, in about 1 ms
MAX_EXACT = 2**53  # up to which doubles are exact
# Bound -> the bound that holds for exactly the numbers that violate it.
_OPPOSITES = {
    "minimum": "exclusiveMaximum", "maximum": "exclusiveMinimum", "exclusiveMinimum": "maximum",
    "exclusiveMaximum": "minimum",
}
Guide = Schema | None


def find_guides(node: Node, keyword: str) -> list[Node]:
    """Return schemas that follow from one keyword of a node."""
    value = node.keywords[keyword]
    found: list[Guide] = []
    if keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
        for name, demand in value.items():
            then = make(required=demand) if isinstance(demand, list) else demand
            is_known = is_listed(node, {*(demand if isinstance(demand, list) else ())})
            condition = make(type="object", required=[name])  # other values have no properties, and no demand
            found.append(guide_condition(node, condition, then, True) if is_known else None)
    elif keyword == "not":
        found = [guide_integers(node), negate(value, node)]
    elif keyword == "oneOf":
        found = [guide_integers(node) or guide_one_of(node, value)]
    elif keyword == "if":
        then, other = node.get("then", True), node.get("else", True)
        found = [guide_integers(node) or guide_condition(node, value, then, other)]
    elif keyword == "pattern":
        patterns = map(remove_assertions, [value, *list_look_aheads(value)])
        found = [make(pattern=pattern) for pattern in patterns if pattern != value]
    elif keyword == "uniqueItems":
        found = [guide_distinct(node)]
    elif keyword == "propertyNames":
        found = [guide_names(node, value)]
    elif keyword == "contains":
        found = [guide_contains(node, value)]
    elif keyword in ("minProperties", "maxProperties"):
        found = [guide_number(node, keyword)]
    guides = (make(allOf=[False]) if guide is False else guide for guide in found)
    return [guide for guide in guides if isinstance(guide, Node)][:MAX_NUM_GUIDES]


def guide_condition(node: Node, condition: Schema, then: Schema, other: Schema) -> Guide:
    """Return that either a condition and its consequence hold, or neither the condition nor its exception."""
    names = ({*condition.get("required", ()), *list_properties(condition)} if isinstance(condition, Node) else set())
    opposite = negate(condition, node)
    if opposite is True or not is_listed(node, names):
        return None
    return make(anyOf=[make(allOf=[condition, then]), make(allOf=[opposite, other])])


def guide_one_of(node: Node, branches: list[Schema]) -> Guide:
    """Return that one branch holds and the others do not."""
    opposites = [negate(branch, node) for branch in branches]
    if len(branches) > MAX_NUM_BRANCHES or all(opposite is True for opposite in opposites):
        return None
    ways = [
        make(allOf=[branch, *(each for each in opposites if each is not opposite)])
        for branch, opposite in zip(branches, opposites, strict=True)
    ]
    return make(anyOf=ways)


def negate(schema: Schema, known: Schema | None) -> Schema:
    """Return a superset of the values that violate a schema; `True` if unknown.

    Args:
        known: a schema that the values satisfy.
    """
    if isinstance(schema, bool):
        return not schema
    around = known if isinstance(known, Node) else make()
    return unite([negate_keyword(keyword, value, around) for keyword, value in schema.keywords.items()])


def unite(ways: list[Schema]) -> Schema:
    """Return the union of schemas."""
    left = [way for way in ways if way is not False]
    if True in left or not left:
        return bool(left)
    return left[0] if len(left) == 1 else make(anyOf=left)


def negate_keyword(keyword: str, value: Any, known: Node) -> Schema:
    """Return a schema of the values that violate one keyword."""
    if keyword == "type":
        return negate_types(list_types(make(type=value)), known)
    if keyword in ("const", "enum"):
        return negate_values(value if keyword == "enum" else [value], known)
    if keyword == "required":
        return unite([make(type="object", properties={name: False}) for name in value])
    if keyword in _OPPOSITES:
        return make(type="number", **{_OPPOSITES[keyword]: value})
    if keyword == "properties":
        return unite([negate_member(name, each, known) for name, each in value.items()])
    if keyword == "not":
        return value
    if keyword == "anyOf":
        parts = [part for each in value if (part := negate(each, known)) is not True]
        return False if False in parts else make(allOf=parts) if parts else True
    return make(type=list(TYPES_OF_KEYWORD[keyword])) if keyword in TYPES_OF_KEYWORD else True


def negate_member(name: str, schema: Schema, known: Node) -> Schema:
    """Return a schema of the objects whose property violates its schema."""
    opposite = negate(schema, find_member(known.keywords, name))
    if opposite is False or not is_listed(known, {name}):
        return opposite is not False
    return make(type="object", properties={name: opposite}, required=[name])


def negate_types(types: set[str], known: Node) -> Schema:
    """Return a schema of the values of other types; no type holds exactly the numbers with a fraction."""
    left = list_types(known) - types
    if "number" in types | left:
        left.discard("integer")
    return make(type=sorted(left)) if left else False


def negate_values(values: list[Any], known: Node) -> Schema:
    """Return a schema of the other values that the known schema lists."""
    if all(value is None for value in values):
        return negate_types({"null"}, known)
    if {"integer", "number"} & list_types(known) == {"integer"} and all(type(value) is int for value in values):
        return exclude_integers(sorted(values), known)
    possible = list_values(known)
    # Numbers have several spellings, and to Python 1 is True.
    if not possible or not all(isinstance(value, str | bool | None) for value in [*values, *possible]):
        return True
    rest = [value for value in possible if value not in values]
    return make(enum=rest) if rest else False


def exclude_integers(values: list[int], known: Node) -> Schema:
    """Return a schema of the integers before, between and behind some, and of the values of other types."""
    bounds = zip([None, *values], [*values, None], strict=True)
    ranges: list[Schema] = []
    for low, high in bounds:
        least = {} if low is None else {"minimum": low + 1}
        if low is None or high is None or high - low > 1:
            ranges.append(make(type="integer", **least, **({} if high is None else {"maximum": high - 1})))
    return unite([*ranges, negate_types({"integer"}, known)])


def is_listed(node: Node, names: set[str]) -> bool:
    """Return whether a node lists these properties or allows no others, so that naming them changes no order."""
    is_closed = node.get("additionalProperties") is False and not node.get("patternProperties")
    return is_closed or names <= list_properties(node).keys()


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
    """Demand as many items as have to match `contains`; list their places where there are few."""
    least, most = node.get("minContains", 1), node.get("maxItems", math.inf)
    if most < least or not least:
        return negate_types({"array"}, make()) if least else None
    # Combinations are counted before they are listed, which would hold the GIL.
    num_choices = math.comb(most, least) if most <= MAX_NUM_CHOICES else math.inf
    if num_choices > MAX_NUM_CHOICES or (
        num_choices * least * len(json.dumps(write_for_validator(wanted))) > MAX_NUM_REPEATED
    ):
        return make(minItems=least)
    chosen = combinations(range(most), least)
    ways = [[wanted if place in choice else True for place in range(choice[-1] + 1)] for choice in chosen]
    return unite([make(prefixItems=way, minItems=len(way)) for way in ways])


def guide_number(node: Node, keyword: str) -> Guide:
    """List which properties of a closed object are present (minProperties) or absent (maxProperties)."""
    names, number = list_properties(node), node.keywords[keyword]
    if keyword == "maxProperties" and number == 0:
        return make(properties=dict.fromkeys(names, False), additionalProperties=False)
    # One more than there are is as impossible as a billion, for which `combinations` takes gigabytes.
    size = min(number, len(names) + 1) if keyword == "minProperties" else max(len(names) - number, 0)
    is_open = node.get("additionalProperties") is not False or node.get("patternProperties")
    if is_open or len(names) > MAX_NUM_CHOICES or math.comb(len(names), size) > MAX_NUM_CHOICES:
        return None
    chosen = [list(choice) for choice in combinations(names, size)]
    if keyword == "minProperties":
        return unite([negate_types({"object"}, node), *(make(required=choice) for choice in chosen)])
    return unite([make(properties=dict.fromkeys(choice, False)) for choice in chosen])


def guide_integers(node: Node) -> Guide:
    """List the valid integers between the bounds of a schema, beside its one bound, or around 0."""
    types = set[str]().union(*map(list_types, [node] if "type" in node.keywords else node.get("oneOf", ())))
    low, high = node.get("minimum"), node.get("maximum")
    if (
        {"integer", "number"} & types != {"integer"}
        or max(abs(low or 0), abs(high or 0)) > MAX_EXACT
        or any("$ref" in each.keywords for each in iterate_nodes([node]))
    ):
        return None
    # Without a bound a model can always add digits, so values beyond these need no check.
    first = math.ceil(low) if low is not None else math.floor(high or 0) - MAX_NUM_VALUES
    last = math.floor(high) if high is not None else first + 2 * MAX_NUM_VALUES
    validator = make_validator(node) if last - first < MAX_NUM_TRIED else None
    values = [value for value in range(first, last + 1) if validator is not None and validator.is_valid(value)]
    if validator is None or len(values) > 2 * MAX_NUM_VALUES:
        return None
    below = low is None and make(type="integer", maximum=first - 1)
    above = high is None and make(type="integer", minimum=last + 1)
    others = negate_types({"integer"}, make(type=sorted(types)))
    return unite([make(enum=values) if values else False, below, above, others])


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
