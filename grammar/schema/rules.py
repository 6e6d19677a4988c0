"""The rewriting rules: each takes one schema object and keeps the set of instances that it accepts."""

from collections.abc import Callable
from typing import Any

from ..errors import InvalidGrammar
from ..plan import ANNOTATION
from ..regex.text import ends_in_escape
from .formats import ASSERTED_FORMATS, EXACT_PATTERNS
from .keywords import ASSERTIONS, IN_PLACE_APPLICATORS, TYPES_OF_KEYWORD
from .node import Node
from .patterns import make_safe

COUNTS = [
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "minContains",
    "maxContains",
]


# Keywords that cannot fail with some value, or without a partner.
_IDLE = frozenset(
    [
        *(
            "uniqueItems",
            "not",
            "propertyNames",
            "unevaluatedItems",
            "unevaluatedProperties",
            "if",
            "then",
            "else",
        ),
        *("contains", "minContains", "maxContains", "minProperties", "minItems", "minLength"),
    ]
)


_MEMBERS = ("properties", "patternProperties", "additionalProperties")
_BRANCHING = frozenset(["$ref", "allOf", "anyOf", "oneOf"])


def write_counts_as_integers(node: Node) -> None:
    """Write 2.0 as 2, which the specification takes for the same."""
    for keyword in COUNTS:
        value = node.schema.get(keyword)
        if isinstance(value, float) and value.is_integer():
            node.schema[keyword] = int(value)


def drop_ref_siblings(node: Node) -> None:
    """Up to draft 7, what stands beside `$ref` asserts nothing; where the draft is not named it counts."""
    if not node.drops_ref_siblings or not isinstance(node.schema.get("$ref"), str):
        return
    for keyword in [k for k in node.schema if k in ASSERTIONS and k != "$ref"]:
        node.drop(keyword)


def modernise_bounds(node: Node) -> None:
    """Turn draft 4's boolean exclusive bounds into numbers."""
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        flag = node.schema.get(exclusive)
        if not isinstance(flag, bool):
            continue
        if flag and bound in node.schema:
            del node.schema[exclusive]
            node.rename(bound, exclusive, node.schema[bound])
        else:
            node.drop(exclusive)


def modernise_items(node: Node) -> None:
    """Turn draft 7's tuples (`items` as a list, then `additionalItems`) into `prefixItems` and `items`."""
    if isinstance(node.schema.get("items"), list):
        if "prefixItems" in node.schema:
            # A list of items is legal only in drafts that do not know `prefixItems`.
            node.drop("prefixItems", ANNOTATION)
        node.rename("items", "prefixItems", node.schema["items"])
        if "additionalItems" in node.schema:
            node.rename("additionalItems", "items", node.schema["additionalItems"])
    elif "additionalItems" in node.schema:
        node.drop("additionalItems")
    if node.schema.get("prefixItems") == []:
        node.drop("prefixItems")


def drop_idle_dependencies(node: Node) -> None:
    """Drop dependencies that demand nothing."""
    for keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
        value = node.schema.get(keyword)
        if isinstance(value, dict) and all(is_trivial(demand) or demand == [] for demand in value.values()):
            node.drop(keyword)


def exclude_types(node: Node) -> None:
    """Drop keywords that speak about other types than the ones the schema allows."""
    types = allowed_types(node.schema)
    if types is None:
        return
    for keyword in [k for k in node.schema if k in TYPES_OF_KEYWORD]:
        if not types.intersection(TYPES_OF_KEYWORD[keyword]):
            node.drop(keyword)


def allowed_types(schema: dict[str, Any]) -> set[str] | None:
    """Return the types that `type` lists, or None when it does not say."""
    declared = schema.get("type")
    if isinstance(declared, str):
        return {declared}
    return {name for name in declared if isinstance(name, str)} if isinstance(declared, list) else None


def filter_enum(node: Node) -> None:
    """Keep the `enum` values that `type` allows, and drop `type`, which is then redundant."""
    types, values = allowed_types(node.schema), node.schema.get("enum")
    if types is None or not isinstance(values, list):
        return
    kept = [value for value in values if types.intersection(types_of(value))]
    if kept:
        node.schema["enum"] = kept


def types_of(value: Any) -> set[str]:
    """Return the JSON Schema types that a value has."""
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return {"integer", "number"}
    names = {float: "number", str: "string", list: "array", dict: "object", type(None): "null"}
    return {names[type(value)]}


def settle_format(node: Node) -> None:
    """Turn a format into an exact pattern, leave it to the engine, or note that it is an annotation."""
    name = node.schema.get("format")
    if name is None:
        return
    if name not in ASSERTED_FORMATS:
        node.drop("format", ANNOTATION)
    elif name in EXACT_PATTERNS:
        del node.schema["format"]
        add_conjunct(node, "pattern", EXACT_PATTERNS[name], "format")


def settle_pattern(node: Node) -> None:
    """Put a form of the pattern that llguidance reads exactly; it may exclude U+0000 in addition."""
    pattern = node.schema.get("pattern")
    if pattern is not None and ends_in_escape(pattern):
        where = node.pointer or "#"
        raise InvalidGrammar(
            f"the schema is malformed at {where}: its pattern ends with a backslash that escapes nothing",
            node.pointer,
        )
    safe = None if pattern is None else make_safe(pattern)
    if safe is not None and safe != pattern:
        node.schema["pattern"] = safe
        node.is_narrowed = True


def add_conjunct(node: Node, keyword: str, value: Any, name: str) -> None:
    """Demand a keyword too, for the user's `name`: beside the others where that is free, else in `allOf`."""
    schema = node.schema
    if keyword not in schema and "$ref" not in schema:
        schema[keyword] = value
        node.origin[keyword] = name
    else:
        branches = schema.get("allOf", [])
        node.conjuncts[len(branches)] = {keyword: name}
        schema["allOf"] = [*branches, {keyword: value}]


def drop_idle(node: Node) -> None:
    """Drop keywords that cannot fail, with their values or without a partner they need."""
    schema = node.schema
    # What `if` and `contains` looked at counts as evaluated, even where they cannot fail.
    is_evaluation_seen = bool({"unevaluatedItems", "unevaluatedProperties"} & schema.keys())
    branches = (schema.get("then", True), schema.get("else", True))
    idle = {
        "uniqueItems": lambda v: v is False or schema.get("maxItems", 2) <= 1,
        "not": lambda v: v is False,
        "propertyNames": is_trivial,
        "unevaluatedItems": is_trivial,
        "unevaluatedProperties": is_trivial,
        "if": lambda v: not is_evaluation_seen and all(map(is_trivial, branches)),
        "contains": lambda v: (
            not is_evaluation_seen and schema.get("minContains") == 0 and "maxContains" not in schema
        ),
        "minProperties": lambda v: v == 0,
        "minItems": lambda v: v == 0,
        "minLength": lambda v: v == 0,
    }
    for keyword in [k for k in schema if k in idle and idle[k](schema[k])]:
        node.drop(keyword)
    for keyword, partner in (
        ("then", "if"),
        ("else", "if"),
        ("minContains", "contains"),
        ("maxContains", "contains"),
    ):
        if keyword in schema and partner not in schema:
            node.drop(keyword)


def is_trivial(value: Any) -> bool:
    """Tell whether a schema is `true` or `{}`."""
    return value is True or value == {}


def close_unevaluated(node: Node) -> None:
    """Without applicators on the same instance, "unevaluated" means "additional"."""
    schema = node.schema
    if IN_PLACE_APPLICATORS & schema.keys():
        return
    for unevaluated, additional in (
        ("unevaluatedProperties", "additionalProperties"),
        ("unevaluatedItems", "items"),
    ):
        # `contains` counts as evaluation of the items it matched.
        if unevaluated not in schema or (additional == "items" and "contains" in schema):
            continue
        if additional in schema:
            node.drop(unevaluated)
        else:
            node.rename(unevaluated, additional, schema[unevaluated])


def settle_property_names(node: Node) -> None:
    """Turn a `propertyNames` that is only a pattern into `patternProperties` that allow nothing else."""
    schema, names = node.schema, node.schema.get("propertyNames")
    taken = {"properties", "patternProperties", "unevaluatedProperties"} & schema.keys()
    if taken or not isinstance(names, dict) or "pattern" not in names:
        return
    if names.keys() - {"pattern", "type", "description", "title"} or names.get("type", "string") != "string":
        return
    allowed = schema.get("additionalProperties", True)
    node.rename("propertyNames", "patternProperties", {names["pattern"]: allowed})
    if "additionalProperties" in schema:
        node.moved.append(f"{node.pointer}/additionalProperties")
    schema["additionalProperties"] = False
    node.origin["additionalProperties"] = "propertyNames"


def gather_members(node: Node) -> None:
    """Put what decides about names together: llguidance reads what stands before and after `allOf` as two schemas."""
    schema = node.schema
    if "additionalProperties" not in schema or _BRANCHING.isdisjoint(schema):
        return
    members = {keyword: schema[keyword] for keyword in _MEMBERS if keyword in schema}
    # At the place of `properties`, so that their order stays the same.
    first = next(iter(members))
    items = list(schema.items())
    schema.clear()
    for keyword, value in items:
        if keyword == first:
            schema.update(members)
        elif keyword not in members:
            schema[keyword] = value


# Each rule with the keywords without which it has nothing to do; in the order they are applied.
RULES: tuple[tuple[Callable[[Node], None], frozenset[str]], ...] = (
    (drop_ref_siblings, frozenset(["$ref"])),
    (write_counts_as_integers, frozenset(COUNTS)),
    (modernise_bounds, frozenset(["exclusiveMinimum", "exclusiveMaximum"])),
    (modernise_items, frozenset(["items", "additionalItems", "prefixItems"])),
    (exclude_types, frozenset(TYPES_OF_KEYWORD)),
    (filter_enum, frozenset(["enum"])),
    (settle_pattern, frozenset(["pattern"])),
    (settle_format, frozenset(["format"])),
    (drop_idle_dependencies, frozenset(["dependencies", "dependentRequired", "dependentSchemas"])),
    (drop_idle, _IDLE),
    (close_unevaluated, frozenset(["unevaluatedItems", "unevaluatedProperties"])),
    (settle_property_names, frozenset(["propertyNames"])),
    (gather_members, frozenset(["patternProperties"])),
)
# Most schemas have none of these.
RULED = frozenset().union(*(keywords for _, keywords in RULES))


def apply_rules(node: Node) -> None:
    """Apply all rules to one schema object."""
    if RULED.isdisjoint(node.schema):
        return
    for rule, keywords in RULES:
        if not keywords.isdisjoint(node.schema):
            rule(node)
