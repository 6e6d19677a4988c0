"""Finds schemas that need rules of their own, and reads keywords about parts of a value."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from .emit import Json, Read
from .keywords import TYPES_OF_KEYWORD
from .node import Node, iterate_children
from .rules import list_types

SCALARS = ("boolean", "null", "number", "string")
CONTAINER_KEYWORDS = frozenset(k for k, types in TYPES_OF_KEYWORD.items() if {"object", "array"} & {*types})
UNIONS = ("anyOf", "oneOf")
APPLIED = frozenset(["$ref", "allOf", *UNIONS])


def find_ordered(root: Node, read: Read, needs_rules: Callable[[Node], bool]) -> set[Node]:
    """Return the nodes that need rules of their own, and all that use them."""
    users: defaultdict[Node, list[Node]] = defaultdict(list)
    seen, pending, ordered = {root}, [root], set()
    while pending:
        node = pending.pop()
        written = Node(node.pointer, read(node))
        if needs_rules(written):
            ordered.add(node)
        related = [child for _, child in iterate_children(written)]
        for child in [*related, written.get("$ref")]:
            if isinstance(child, Node):
                users[child].append(node)
                if child not in seen:
                    seen.add(child)
                    pending.append(child)
    pending = list(ordered)
    while pending:
        new = set(users[pending.pop()]) - ordered
        ordered |= new
        pending.extend(new)
    return ordered


def fixes_order(node: Node) -> bool:
    """Return whether a node itself concerns objects of several properties."""
    names = {**node.get("properties", {}), **dict.fromkeys(node.get("required", ()))}
    is_open = node.get("additionalProperties", True) is not False or "patternProperties" in node.keywords
    if len(names) + is_open > 1 and names:
        return True
    return any(is_ordered(value) for value in (node.get("const"), *node.get("enum", ())))


def is_ordered(value: Any) -> bool:
    """Return whether a listed value contains an object of several properties."""
    if isinstance(value, list):
        return any(map(is_ordered, value))
    return isinstance(value, dict) and (len(value) > 1 or any(map(is_ordered, value.values())))


def read_types(node: Node) -> set[str]:
    """Return the types that a node allows; every integer is a number."""
    types = list_types(node)
    return types | {"number"} if "integer" in types else types


def join_scalars(parts: list[Json], types: list[str]) -> Node:
    """Return the constraints of some nodes on values of these types."""
    skipped = APPLIED | CONTAINER_KEYWORDS
    kept = [{keyword: value for keyword, value in part.items() if keyword not in skipped} for part in parts]
    return Node("", {"type": types, "allOf": [Node("", part) for part in kept if part]})
