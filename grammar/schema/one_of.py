"""Guides for `oneOf` where its branches overlap: each branch without what another one takes too."""

from collections import Counter
from typing import Any

from .count_guides import MAX_NUM_TRIED, guide_integers, has_reference, list_values, make, make_validator
from .guides import is_listed, leave_out_types, list_satisfied, only_required
from .node import Node, Schema


def find_one_of_guides(node: Node) -> list[Node]:
    """Return schemas that follow from the `oneOf` of a node."""
    return [guide for guide in (guide_integers(node), guide_shared_types(node)) if guide is not None]


def guide_shared_types(node: Node) -> Node | None:
    """Types all of whose values satisfy two branches are left out."""
    branches = [
        make() if branch is True else branch for branch in node.keywords["oneOf"] if branch is not False
    ]
    counts = Counter(kind for branch in branches for kind in list_all_satisfied(branch))
    return leave_out_types(node, {kind for kind, number in counts.items() if number > 1})


def list_all_satisfied(node: Node) -> set[str]:
    """Return the types all of whose values satisfy a schema; every integer is a number."""
    types = list_satisfied(node)
    return types | {"integer"} if "number" in types else types


def narrow_branches(node: Node) -> list[Schema]:
    """Return what is left of the branches of `oneOf` without what more than one of them takes."""
    branches: list[Schema] = node.keywords["oneOf"]
    return exclude_others(node, branches) or exclude_shared_values(branches)


def exclude_others(node: Node, branches: list[Schema]) -> list[Schema] | None:
    """Return the branches of `oneOf`, each without what only the others demand; None where that cannot be said."""
    demands = [only_required(branch) for branch in branches]
    if not all(names and is_listed(node, names) for names in demands):
        return None
    found: list[Schema] = []
    for own in demands:
        others = [sorted((other or set()) - (own or set())) for other in demands if other is not own]
        if not all(others):
            return None
        excluded = [make(anyOf=[make(properties={name: False}) for name in names]) for names in others]
        found.append(make(required=sorted(own or ()), allOf=excluded))
    return found


def exclude_shared_values(branches: list[Schema]) -> list[Schema]:
    """Return branches that list their values, or are null or a boolean, without the values that another takes."""
    listed = [list_few(branch) for branch in branches]
    whole = make(oneOf=branches)
    if not 0 < sum(map(len, listed)) <= MAX_NUM_TRIED or has_reference(whole):
        return branches
    validator = make_validator(whole)
    if validator is None:
        return branches
    kept = [[value for value in values if validator.is_valid(value)] for values in listed]
    pairs = zip(branches, listed, kept, strict=True)
    return [branch if own == left else keep_values(branch, left) for branch, own, left in pairs]


def list_few(schema: Schema) -> list[Any]:
    """Return the values that a schema lists or has by its type, [] when it does not tell."""
    few: dict[str, list[Any]] = {"null": [None], "boolean": [False, True]}
    kind = str(schema.get("type")) if isinstance(schema, Node) else ""
    return list_values(schema) or few.get(kind, [])


def keep_values(branch: Schema, values: list[Any]) -> Schema:
    """Return a branch with only some of its values."""
    if not values or not isinstance(branch, Node):
        return False
    kept = {name: value for name, value in branch.keywords.items() if name != "const"}
    return Node(branch.pointer, kept | {"enum": values})
