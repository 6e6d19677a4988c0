"""Guides for `oneOf` where its branches overlap: each branch without what another one takes too."""

from collections import Counter
from typing import Any

from .count_guides import MAX_NUM_TRIED, guide_integers, list_values, make_validator
from .guides import is_listed, leave_out_types, list_satisfied, only_required

Schema = dict[str, Any]


def find_guides(schema: Schema) -> list[Schema]:
    """Return schemas that follow from the `oneOf` of a schema."""
    return [guide for guide in (guide_integers(schema), guide_types(schema)) if guide]


def guide_types(schema: Schema) -> Schema:
    """Types all of whose values satisfy two branches are left out."""
    branches = [{} if branch is True else branch for branch in schema["oneOf"] if branch is not False]
    counts = Counter(kind for branch in branches for kind in list_all_satisfied(branch))
    return leave_out_types(schema, {kind for kind, number in counts.items() if number > 1})


def list_all_satisfied(schema: Schema) -> set[str]:
    """Return the types all of whose values satisfy a schema; every integer is a number."""
    types = list_satisfied(schema)
    return types | {"integer"} if "number" in types else types


def narrow_branches(schema: Schema, branches: list[Any]) -> list[Any]:
    """Return what is left of the branches of `oneOf` without what more than one of them takes.

    Args:
        schema: with `oneOf` as it was before anything was dropped from its branches.
        branches: the same in their present form.
    """
    return exclude_others(schema, schema["oneOf"]) or exclude_shared_values(schema["oneOf"], branches)


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


def exclude_shared_values(written: list[Any], branches: list[Any]) -> list[Any]:
    """Return branches that list their values, or are null or a boolean, without the values that another takes."""
    listed = [list_few(branch) for branch in written]
    if not 0 < sum(map(len, listed)) <= MAX_NUM_TRIED or "$ref" in str(written):
        return branches
    validator = make_validator({"oneOf": written})
    if validator is None:
        return branches
    kept = [[value for value in values if validator.is_valid(value)] for values in listed]
    pairs = zip(branches, listed, kept, strict=True)
    return [branch if own == left else keep_values(branch, left) for branch, own, left in pairs]


def list_few(schema: Any) -> list[Any]:
    """Return the values that a schema lists or has by its type, [] when it does not tell."""
    few: dict[str, list[Any]] = {"null": [None], "boolean": [False, True]}
    kind = str(schema.get("type")) if isinstance(schema, dict) else ""
    return list_values(schema) or few.get(kind, [])


def keep_values(branch: Schema, values: list[Any]) -> Schema | bool:
    """Return a branch with only some of its values; a listing that was dropped from it stays so."""
    if not values:
        return False
    if not list_few(branch):
        return branch
    return {name: value for name, value in branch.items() if name != "const"} | {"enum": values}
