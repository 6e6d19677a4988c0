"""Guides: what follows from a keyword that is left to residual checks, said in keywords that an engine enforces.

A guide holds for every valid instance, so adding it to a loosened schema loses none; it keeps the text from running
into a place where the check leaves no way on. It need not say all: the check itself stays.
"""

from typing import Any

from ..regex.assertions import find_guides as find_patterns
from ..regex.assertions import remove_assertions
from ..regex.linear_pattern import read_pattern
from .count_guides import (
    TYPES,
    guide_contains,
    guide_distinct,
    guide_integers,
    guide_names,
    guide_number,
    list_types,
    list_values,
)
from .keywords import ASSERTIONS, TYPES_OF_KEYWORD, list_properties
from .problems import MAX_BOUND, find_inexact
from .rules import allowed_types, types_of

Schema = dict[str, Any]

MAX_NUM_GUIDES = 4
_ANNOTATIONS = frozenset(["title", "description", "$comment"])
# Which numbers a bound leaves to the others.
_OPPOSITES = {
    "minimum": "exclusiveMaximum",
    "maximum": "exclusiveMinimum",
    "exclusiveMinimum": "maximum",
    "exclusiveMaximum": "minimum",
}


def find_guides(schema: Schema, keyword: str) -> list[Schema]:
    """Return schemas that follow from one keyword of a schema."""
    value = schema[keyword]
    if keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
        found = [guide_dependency(schema, name, demand) for name, demand in value.items()]
    elif keyword == "not":
        same = schema | {"then": False, "else": True}
        guide = guide_integers(schema) or guide_exclusion(schema, value) or guide_condition(same, value)
        found = [guide, guide_types(schema, value), guide_negation(value)]
    elif keyword == "if":
        found = [guide_integers(schema) or guide_condition(schema, value)]
    elif keyword == "pattern":
        found = [{"pattern": pattern} for pattern in find_patterns(value) if pattern != value]
    elif keyword == "patternProperties":
        found = [guide_patterns(schema, value)]
    elif keyword == "uniqueItems":
        found = [guide_distinct(schema)]
    elif keyword == "propertyNames":
        found = [guide_names(schema, value)]
    elif keyword == "contains":
        found = [guide_contains(schema, value)]
    elif keyword in ("minProperties", "maxProperties"):
        found = [guide_number(schema, keyword)]
    elif keyword in _OPPOSITES:
        found = [guide_bound(keyword, value)]
    elif keyword in ("enum", "const"):
        found = [guide_values(value if keyword == "enum" else [value])]
    else:
        found = []
    return [guide for guide in found if guide][:MAX_NUM_GUIDES]


def guide_bound(keyword: str, value: int | float) -> Schema:
    """A bound far from zero leaves only numbers on its own side of zero, and of as many digits."""
    if keyword in ("minimum", "exclusiveMinimum"):
        return {"minimum": MAX_BOUND - 1} if value >= MAX_BOUND else {}
    return {"maximum": 1 - MAX_BOUND} if value <= -MAX_BOUND else {}


def guide_values(values: list[Any]) -> Schema:
    """Of listed values those that an engine reads exactly, and the types of the others."""
    exact = [value for value in values if find_inexact(value) is None]
    types = {kind for value in values if find_inexact(value) is not None for kind in types_of(value)}
    others = {"type": sorted(types)}
    return {"anyOf": [{"enum": exact}, others]} if exact else others


def guide_dependency(schema: Schema, name: str, demand: Any) -> Schema:
    """Either the property is absent or those it demands are present, or its schema is satisfied."""
    absent = {"properties": {name: False}}
    if isinstance(demand, list):
        return {"anyOf": [absent, {"required": demand}]} if is_listed(schema, {name, *demand}) else {}
    if not is_listed(schema, {name}):
        return {}
    return {"anyOf": [absent, {"allOf": [{"required": [name]}, demand]}]}


def guide_patterns(schema: Schema, patterns: dict[str, Any]) -> Schema:
    """Where each name has to match a pattern with assertions or another one: it matches them without assertions."""
    plain = {pattern: remove_assertions(pattern) for pattern in patterns}
    if schema.get("additionalProperties") is not False or all(old == new for old, new in plain.items()):
        return {}
    # One pattern, since more could overlap; so a value has to satisfy what is said of some name.
    listed = schema.get("properties", {})
    union = "|".join(f"(?:{pattern})" for pattern in plain.values())
    within = read_pattern(f"(?s:.*)(?:{union})(?s:.*)")
    met = [part for name, part in listed.items() if within is None or within.matches(name) is not False]
    values = [*patterns.values(), *met]
    return {
        "properties": dict.fromkeys(listed, True),
        "patternProperties": {union: values[0] if len(values) == 1 else {"anyOf": values}},
        "additionalProperties": False,
    }


def guide_exclusion(schema: Schema, excluded: Any) -> Schema:
    """`not` of nothing but `required`: one of the properties is absent; of several such schemas: in each."""
    guides = []
    for branch in list_branches(excluded):
        names = only_required(branch)
        if not names or not is_listed(schema, names):
            return {}
        guides.append({"anyOf": [{"properties": {name: False}} for name in sorted(names)]})
    return {"allOf": guides} if len(guides) > 1 else guides[0] if guides else {}


def guide_types(schema: Schema, excluded: Any) -> Schema:
    """`not` of a schema that all values of some types satisfy: the value is of another type."""
    return leave_out_types(
        schema, {kind for each in list_branches(excluded) for kind in list_satisfied(each)}
    )


def guide_negation(excluded: Any) -> Schema:
    """`not` of nothing but `not`: what that one excludes."""
    is_negation = isinstance(excluded, dict) and excluded.keys() - _ANNOTATIONS == {"not"}
    return {"allOf": [excluded["not"]]} if is_negation else {}


def leave_out_types(schema: Schema, taken: set[str]) -> Schema:
    """Return a guide to the types of a schema without those taken, {} where none of them is its own."""
    own = list_types(schema)
    # Every integer is a number.
    left = [kind for kind in own if kind not in taken and not (kind == "integer" and "number" in taken)]
    return {} if left == own else {"type": left}


def list_branches(excluded: Any) -> list[Schema]:
    """Return the schemas none of which a value may satisfy, of the one in a `not`."""
    branches = [excluded]
    if isinstance(excluded, dict) and excluded.keys() - _ANNOTATIONS == {"anyOf"}:
        branches = excluded["anyOf"]
    return [{} if branch is True else branch for branch in branches if branch is not False]


def list_satisfied(schema: Schema) -> set[str]:
    """Return the types all of whose values satisfy a schema."""
    keywords, types = schema.keys() & ASSERTIONS - {"type"}, set(list_types(schema))
    if keywords == {"anyOf"}:
        branches = list_branches({"anyOf": schema["anyOf"]})
        return types & {kind for branch in branches for kind in list_satisfied(branch)}
    if not keywords <= TYPES_OF_KEYWORD.keys():
        return set()
    return types - {kind for keyword in keywords for kind in TYPES_OF_KEYWORD[keyword]}


def guide_condition(schema: Schema, condition: Any) -> Schema:
    """`if` about the presence of one property, or about its value where the schema lists the values."""
    then, other = schema.get("then", True), schema.get("else", True)
    if (
        not isinstance(then, dict | bool)
        or not isinstance(other, dict | bool)
        or not isinstance(condition, dict)
    ):
        return {}
    names = only_required(condition)
    if names and len(names) == 1 and is_listed(schema, names):
        (name,) = names
        absent, present = {"properties": {name: False}}, {"required": [name]}
        return {"anyOf": [{"allOf": [absent, other]}, {"allOf": [present, then]}]}
    return guide_value(schema, condition, then, other)


def guide_value(schema: Schema, condition: Schema, then: Any, other: Any) -> Schema:
    """`if` about one property's value, which has to be one of a list, or about a bound of a number."""
    properties = condition.get("properties")
    names = set(properties) if isinstance(properties, dict) else set()
    if condition.keys() - _ANNOTATIONS - {"required"} != {"properties"} or len(names) != 1:
        return {}
    if not is_listed(schema, names) or not names >= set(condition.get("required", [])):
        return {}
    (name,) = names
    # A name that is not listed is that of no property here.
    listed = list_properties(schema).get(name, False)
    parts = [{}] if listed is False else split_values(condition["properties"][name], listed)
    branches = [
        {"allOf": [{"properties": {name: part}, "required": [name]}, demand]}
        for part, demand in zip(parts, (then, other), strict=False)
    ]
    absent = other if condition.get("required") else then
    branches.append({"allOf": [{"properties": {name: False}}, absent]})
    return {"anyOf": branches} if parts else {}


def split_values(condition: Any, listed: Any) -> list[Schema]:
    """Return schemas of the values of a property that satisfy a condition and, if any, of those that do not.

    [] where that cannot be said.
    """
    if not isinstance(condition, dict) or not isinstance(listed, dict):
        return []
    if condition.keys() - _ANNOTATIONS == {"not"}:
        parts = split_values(condition["not"], listed)
        return parts[::-1] if len(parts) == 2 else []
    kind, keywords = listed.get("type"), condition.keys() - _ANNOTATIONS - {"type"}
    types = allowed_types(condition)
    if keywords and keywords <= _OPPOSITES.keys():
        return split_bounds({name: condition[name] for name in keywords}, types, listed)
    if not keywords and types:
        return split_types(types)
    if keywords not in ({"enum"}, {"const"}):
        return []
    listing = condition["enum"] if "enum" in condition else [condition["const"]]
    meant = [value for value in listing if types is None or types & types_of(value)]
    if meant and all(value is None for value in meant):
        return split_types({"null"})
    possible = [True, False] if kind == "boolean" else list_values(listed)
    # Numbers have several spellings, and to Python 1 is True.
    if not meant or not possible or not all(isinstance(v, str | bool | None) for v in [*meant, *possible]):
        return []
    rest = [value for value in possible if value not in meant]
    return [{"enum": meant}, {"enum": rest}] if rest else [{"enum": meant}]


def split_bounds(bounds: Schema, types: set[str] | None, listed: Schema) -> list[Schema]:
    """Return schemas of the values of some types, numbers within bounds among them, and of all others."""
    if types is not None and "number" not in types:
        if "integer" not in types or may_be_fraction(listed):
            return []
        types = types - {"integer"} | {"number"}
    rest = [] if types is None else [name for name in TYPES if name not in types]
    beyond: list[Schema] = [{"type": "number", _OPPOSITES[name]: bounds[name]} for name in bounds]
    within = bounds if types is None else {"type": sorted(types), **bounds}
    return [within, {"anyOf": [*beyond, {"type": rest}] if rest else beyond}]


def may_be_fraction(schema: Any) -> bool:
    """Tell whether a number that is not whole may satisfy a schema, as far as its types tell."""
    if not isinstance(schema, dict):
        return schema is not False
    if "type" in schema:
        return "number" in list_types(schema)
    branches = schema.get("anyOf", schema.get("oneOf"))
    return branches is None or any(map(may_be_fraction, branches))


def split_types(types: set[str]) -> list[Schema]:
    """Return schemas of the values of some types and of all others."""
    if "integer" in types:
        # No type is that of the numbers that are not whole.
        return []
    rest = [name for name in TYPES if name not in types]
    return [{"type": sorted(types)}, {"type": rest}] if rest else []


def only_required(schema: Any) -> set[str] | None:
    """Return the names that a schema requires, None when it says anything else."""
    if not isinstance(schema, dict) or schema.keys() - _ANNOTATIONS != {"required"}:
        return None
    return set(schema["required"])


def is_listed(schema: Schema, names: set[str]) -> bool:
    """Tell whether a schema lists these properties or allows no others, so that naming them changes no order."""
    is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    return is_closed or names <= list_properties(schema).keys()
