"""Which strings of an instance can decide a residual check, so that the verdict on all others is the same.

Below a residual keyword every assertion counts: `const` and `enum` tell a few strings from all others, a pattern or
a length may tell any two strings apart. Outside, the engine has already seen to what stands in the schema.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from .node import Node, Path, iterate_children

# A keyword of a node, an assertion that counts.
Item = tuple[Node, str]

_IN_PLACE = frozenset(
    ["allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependencies", "dependentSchemas"]
)
_ANY_STRING = frozenset(["pattern", "format", "minLength", "maxLength"])
_VALUES = frozenset(["const", "enum"])
_UNEVALUATED = frozenset(["unevaluatedItems", "unevaluatedProperties"])
_MEMBERS = frozenset(["properties", "patternProperties", "additionalProperties", "unevaluatedProperties"])
_ELEMENTS = frozenset(["items", "prefixItems", "contains", "unevaluatedItems"])


@dataclass(frozen=True, slots=True)
class Deciding:
    """What counts at one place of an instance.

    Attributes:
        items: the assertions that count there and below.
        strings: the strings that differ from all others; None where any two may differ.
        is_whole: a value around this place is compared as a whole.
        is_unique: an array there has its elements compared with one another.
        is_compared: a value there is compared with its siblings.
    """

    items: frozenset[Item] = frozenset()
    strings: frozenset[str] | None = frozenset()
    is_whole: bool = False
    is_unique: bool = False
    is_compared: bool = False

    def member(self, name: str) -> "Deciding":
        """Return what comes from a place to one of its properties."""
        return self._descend(_MEMBERS, lambda path: path[0] != "properties" or path[-1] == name)

    def element(self) -> "Deciding":
        """Return what comes from a place to any of its elements."""
        found = self._descend(_ELEMENTS, lambda path: True)
        return replace(found, is_compared=True) if self.is_unique else found

    def lists(self, name: str) -> bool:
        """Tell whether a property has a schema of its own in what counts."""
        return any(keyword == "properties" and name in node.keywords[keyword] for node, keyword in self.items)

    def _descend(self, keywords: frozenset[str], is_meant: Callable[[Path], bool]) -> "Deciding":
        if self.is_whole or self.is_compared:
            return ANYTHING
        items: set[Item] = set()
        for node, keyword in self.items:
            for path, child in iterate_children(node) if keyword in keywords else ():
                if path[0] == keyword and isinstance(child, Node) and is_meant(path):
                    items.update(list_items(child))
        return Deciding(frozenset(items)) if items else NOTHING


# Nothing counts: no check looks at the strings there.
NOTHING = Deciding()
# Anything may count.
ANYTHING = Deciding(strings=None, is_whole=True)


def list_items(node: Node) -> Iterator[Item]:
    """Yield all assertions of a node."""
    return ((node, keyword) for keyword in node.keywords)


def gather(start: Deciding, items: Iterable[Item]) -> Deciding:
    """Return what counts at a place: what comes from above and the assertions found there."""
    strings: set[str] = set()
    is_any, is_whole, is_unique = start.is_whole, start.is_whole, False
    seen: set[Item] = set()
    pending = [*start.items, *items]
    while pending:
        item = pending.pop()
        if item in seen:
            continue
        seen.add(item)
        node, keyword = item
        is_any |= keyword in _ANY_STRING
        is_unique |= keyword == "uniqueItems"
        if keyword in _VALUES:
            values: list[Any] = node.keywords["enum"] if keyword == "enum" else [node.keywords["const"]]
            strings.update(value for value in values if isinstance(value, str))
            is_whole |= any(isinstance(value, dict | list) for value in values)
        pending.extend(list_applied_items(node, keyword))
    decided = None if is_any else frozenset(strings)
    return Deciding(frozenset(seen), decided, is_whole, is_unique, start.is_compared)


def list_applied_items(node: Node, keyword: str) -> Iterator[Item]:
    """Yield the assertions that a keyword brings to the same value."""
    if keyword == "$ref":
        yield from list_items(node.keywords["$ref"])
    elif keyword in _UNEVALUATED:
        # Which branches hold decides what is evaluated.
        yield from (
            (node, other) for other in node.keywords if other in _IN_PLACE or other in ("$ref", "contains")
        )
    elif keyword in _IN_PLACE:
        for path, child in iterate_children(node):
            if path[0] == keyword and isinstance(child, Node):
                yield from list_items(child)
        if keyword == "if":
            yield from ((node, other) for other in ("then", "else") if other in node.keywords)
