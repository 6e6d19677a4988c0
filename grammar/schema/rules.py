"""The rewriting rules: each takes one node while it is read and keeps the set of instances that it accepts."""

from collections.abc import Callable
from typing import Any

from ..errors import InvalidGrammar
from ..plan import ANNOTATION
from ..regex.dialects import read_ecma, read_names
from ..regex.text import ends_in_escape
from .formats import ASSERTED_FORMATS
from .keywords import IN_PLACE_APPLICATORS, TYPES_OF_KEYWORD
from .node import Node, Schema, is_trivial

TYPES = ("object", "array", "string", "number", "boolean", "null")
_ALL = (*TYPES, "integer")
# Strings of schemas with this annotation are quotations from a source (schema/quotations.py).
GROUNDED = "x-grounded"
COUNTS = frozenset(
    [
        *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
        *("minContains", "maxContains"),
    ]
)
# Keywords that mean nothing without a partner.
_PARTNERS = (("then", "if"), ("else", "if"), ("minContains", "contains"), ("maxContains", "contains"))


def write_counts_as_integers(node: Node) -> None:
    """Write 2.0 as 2, which the specification takes for the same."""
    for keyword in COUNTS & node.keywords.keys():
        value = node.keywords[keyword]
        if isinstance(value, float) and value.is_integer():
            node.keywords[keyword] = int(value)


def modernise_bounds(node: Node) -> None:
    """Turn draft 4's boolean exclusive bounds into numbers."""
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        flag = node.get(exclusive)
        if not isinstance(flag, bool):
            continue
        if flag and bound in node.keywords:
            del node.keywords[exclusive]
            node.rename(bound, exclusive, node.keywords[bound])
        else:
            node.drop(exclusive)


def modernise_items(node: Node) -> None:
    """Turn draft 7's tuples (`items` as a list, then `additionalItems`) into `prefixItems` and `items`."""
    if isinstance(node.get("items"), list):
        if "prefixItems" in node.keywords:
            # A list of items is legal only in drafts that do not know `prefixItems`.
            node.drop("prefixItems", ANNOTATION)
        node.rename("items", "prefixItems", node.keywords["items"])
        if "additionalItems" in node.keywords:
            node.rename("additionalItems", "items", node.keywords["additionalItems"])
    elif "additionalItems" in node.keywords:
        node.drop("additionalItems")
    if node.get("prefixItems") == []:
        node.drop("prefixItems")


def exclude_types(node: Node) -> None:
    """Drop keywords that speak about other types than the ones the schema allows."""
    types = list_types(node)
    for keyword in [k for k in node.keywords if k in TYPES_OF_KEYWORD]:
        if types.isdisjoint(TYPES_OF_KEYWORD[keyword]):
            node.drop(keyword)


def list_types(schema: Schema) -> set[str]:
    """Return the types that `type` lists, all types where it does not say."""
    declared = schema.get("type", _ALL) if isinstance(schema, Node) else _ALL
    return {declared} if isinstance(declared, str) else set(declared)


def types_of(value: Any) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return {"integer", "number"}
    names = {float: "number", str: "string", list: "array", dict: "object", type(None): "null"}
    return {names[type(value)]}


def check_strings(node: Node) -> None:
    """Refuse a malformed pattern, translate the others; note the formats that are annotations."""
    if ends_in_escape(node.get("pattern", "")):
        where = node.pointer or "#"
        raise InvalidGrammar(
            f"the schema is malformed at {where}: its pattern ends with a backslash that escapes nothing",
            node.pointer,
        )
    if "pattern" in node.keywords:
        node.keywords["pattern"] = read_ecma(node.keywords["pattern"])
    if "patternProperties" in node.keywords:
        node.keywords["patternProperties"] = read_names(node.keywords["patternProperties"])
    if "format" in node.keywords and node.keywords["format"] not in ASSERTED_FORMATS:
        node.drop("format", ANNOTATION)


def drop_idle(node: Node) -> None:
    """Drop keywords that cannot fail, with their values or without a partner they need."""
    keywords = node.keywords
    for keyword in [k for k in keywords if k in _IDLE and _IDLE[k](node, keywords[k])]:
        node.drop(keyword)
    for keyword, partner in _PARTNERS:
        if keyword in keywords and partner not in keywords:
            node.drop(keyword)


_IDLE: dict[str, Callable[[Node, Any], bool]] = {
    "uniqueItems": lambda node, value: value is False or node.get("maxItems", 2) <= 1,
    **dict.fromkeys(
        ("propertyNames", "unevaluatedItems", "unevaluatedProperties"), lambda node, value: is_trivial(value)
    ),
}


def close_unevaluated(node: Node) -> None:
    """Without applicators on the same instance, "unevaluated" means "additional"."""
    pairs = (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items"))
    for unevaluated, additional in pairs:
        # `contains` counts as evaluation of the items it matched.
        others = IN_PLACE_APPLICATORS | {additional, "contains"}
        if unevaluated in node.keywords and others.isdisjoint(node.keywords):
            node.rename(unevaluated, additional, node.keywords[unevaluated])


# Each rule with the keywords without which it has nothing to do; in the order they are applied.
_RULES: tuple[tuple[Callable[[Node], None], frozenset[str]], ...] = (
    (write_counts_as_integers, COUNTS), (modernise_bounds, frozenset(["exclusiveMinimum", "exclusiveMaximum"])),
    (modernise_items, frozenset(["items", "additionalItems", "prefixItems"])),
    (exclude_types, frozenset(TYPES_OF_KEYWORD)),
    (check_strings, frozenset(["pattern", "patternProperties", "format"])),
    (drop_idle, frozenset(_IDLE) | frozenset(name for name, _ in _PARTNERS)),
    (close_unevaluated, frozenset(["unevaluatedItems", "unevaluatedProperties"])),
)
# Most schemas have none of these.
_RULED = frozenset().union(*(keywords for _, keywords in _RULES))


def apply_rules(node: Node) -> None:
    if _RULED.isdisjoint(node.keywords):
        return
    for rule, keywords in _RULES:
        if not keywords.isdisjoint(node.keywords):
            rule(node)
