"""Guides: what follows from a keyword that is left to residual checks, said in keywords that an engine enforces.

A guide holds for every valid instance, so adding it to a loosened schema loses none; it keeps the text from running
into a place where the check leaves no way on. It need not say all: the check itself stays.
"""

from typing import Any

from .count_guides import guide_contains, guide_distinct, guide_names, guide_number, list_values

Schema = dict[str, Any]

MAX_NUM_GUIDES = 4
_ANNOTATIONS = frozenset(["title", "description", "$comment"])


def find_guides(schema: Schema, keyword: str) -> list[Schema]:
    """Return schemas that follow from one keyword of a schema."""
    value = schema[keyword]
    if keyword in ("dependentRequired", "dependencies"):
        found = [
            guide_dependency(schema, name, names) for name, names in value.items() if isinstance(names, list)
        ]
    elif keyword == "not":
        found = [guide_exclusion(schema, value)]
    elif keyword == "if":
        found = [guide_condition(schema, value)]
    elif keyword == "uniqueItems":
        found = [guide_distinct(schema)]
    elif keyword == "propertyNames":
        found = [guide_names(schema, value)]
    elif keyword == "contains":
        found = [guide_contains(schema, value)]
    elif keyword in ("minProperties", "maxProperties"):
        found = [guide_number(schema, keyword)]
    else:
        found = []
    return [guide for guide in found if guide][:MAX_NUM_GUIDES]


def guide_dependency(schema: Schema, name: str, names: list[str]) -> Schema:
    """Either the property is absent or those it demands are present."""
    if not is_listed(schema, {name, *names}):
        return {}
    return {"anyOf": [{"properties": {name: False}}, {"required": names}]}


def guide_exclusion(schema: Schema, excluded: Any) -> Schema:
    """`not` of nothing but `required`: one of the properties is absent; of several such schemas: in each."""
    if not isinstance(excluded, dict):
        return {}
    branches = excluded.get("anyOf") if excluded.keys() - _ANNOTATIONS == {"anyOf"} else [excluded]
    guides = []
    for branch in branches if isinstance(branches, list) else ():
        names = only_required(branch)
        if not names or not is_listed(schema, names):
            return {}
        guides.append({"anyOf": [{"properties": {name: False}} for name in sorted(names)]})
    return guides[0] if len(guides) == 1 else {"allOf": guides}


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
    """`if` about one property's value, which has to be one of a list."""
    properties = condition.get("properties")
    names = set(properties) if isinstance(properties, dict) else set()
    if condition.keys() - _ANNOTATIONS - {"required"} != {"properties"} or len(names) != 1:
        return {}
    if not is_listed(schema, names) or not names >= set(condition.get("required", [])):
        return {}
    (name,) = names
    meant, possible = list_values(condition["properties"][name]), list_values(schema["properties"][name])
    if meant is None or possible is None or not all(isinstance(value, str) for value in [*meant, *possible]):
        return {}
    rest = [value for value in possible if value not in meant]
    branches = [{"allOf": [{"properties": {name: {"enum": meant}}, "required": [name]}, then]}]
    if rest:
        branches.append({"allOf": [{"properties": {name: {"enum": rest}}, "required": [name]}, other]})
    absent = other if "required" in condition else then
    branches.append({"allOf": [{"properties": {name: False}}, absent]})
    return {"anyOf": branches}


def exclude_others(schema: Schema, branches: list[Any]) -> list[Any] | None:
    """Return the branches of `oneOf`, each without what only the others demand; None where that cannot be said."""
    demands = [only_required(branch) for branch in branches]
    if not all(names and is_listed(schema, names) for names in demands):
        return None
    found = []
    for own in demands:
        others = [sorted((other or set()) - (own or set())) for other in demands if other is not own]
        if not all(others):
            return None
        excluded = [{"anyOf": [{"properties": {name: False}} for name in names]} for names in others]
        found.append({"required": sorted(own or ()), "allOf": excluded})
    return found


def only_required(schema: Any) -> set[str] | None:
    """Return the names that a schema requires, None when it says anything else."""
    if not isinstance(schema, dict) or schema.keys() - _ANNOTATIONS != {"required"}:
        return None
    return set(schema["required"])


def is_listed(schema: Schema, names: set[str]) -> bool:
    """Tell whether a schema lists these properties, so that naming them again does not change their order."""
    properties = schema.get("properties")
    return isinstance(properties, dict) and names <= properties.keys()
