"""Finds schemas that need rules of their own, reads keywords about parts of a value, writes members in any order."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..engines.lark_rules import LarkRules
from ..regex.text import escape, write_terminal
from .emit import Json, Read
from .keywords import TYPES_OF_KEYWORD
from .node import Node, iterate_children
from .rules import list_types

SCALARS = ("boolean", "null", "number", "string")
CONTAINER_KEYWORDS = frozenset(k for k, types in TYPES_OF_KEYWORD.items() if {"object", "array"} & {*types})
UNIONS = ("anyOf", "oneOf")
APPLIED = frozenset(["$ref", "allOf", *UNIONS])
# Bits of a rule's number, less one. Names beyond may be repeated, which changes no verdict.
MAX_NUM_BITS = 63
# Properties of an object that llguidance gets as JSON, for which it takes quadratic time: 0.1 s for 1,000.
MAX_NUM_LISTED = 1000
# A name in JSON as llguidance writes it.
JSON_NAME = r'"(?:[^"\\\x00-\x1F\x7F]|\\["\\bfnrt])*"'


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


def is_large(node: Node) -> bool:
    """Return whether a node lists so many properties that llguidance takes long to compile them, but not as rules."""
    return len(node.get("properties") or ()) > MAX_NUM_LISTED


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


def write_members(
    lark: LarkRules, members: Sequence[tuple[str, str]], num_required: int, close: str, other: tuple[str, str] | None
) -> str:
    """Write the rules of members in any order, each at most once, and return how they begin.

    Args:
        members: each as the first one and as a later one; those that have to be there come first.
        close: what may follow then.
        other: a member that is not listed, which may come several times.
    """
    rest = f"r{len(lark.rules)}"
    end = f" %if is_ones([0:{num_required}])" if num_required else ""
    lines, firsts = [f"{close}{end}"], [] if num_required else [close]
    for bit, (first, later) in enumerate(members):
        is_noted = bit < MAX_NUM_BITS
        lines.append(f"{later} {rest}::" + (f"set_bit({bit}) %if bit_clear({bit})" if is_noted else "_"))
        firsts.append(f"{first} {rest}::{1 << bit if is_noted else 0}")
    if other is not None:
        lines.append(f"{other[1]} {rest}::_")
        firsts.append(f"{other[0]} {rest}::0")
    lark.rules[f"{rest}::_"] = "\n| ".join(lines)
    is_alike = all(first == later for first, later in (*members, *([other] if other is not None else [])))
    return f"{rest}::0" if is_alike else lark.rule(" | ".join(firsts))


def write_other_name(pattern: str, names: Iterable[str]) -> str:
    """Return the terminal of the names that match a pattern, but for some."""
    known = "|".join(map(escape, names))
    cut = f" & ~{write_terminal(f'(?:{known})')}" if known else ""
    return f"{write_terminal(pattern)}{cut}"
