"""Where in an instance a residual check applies unconditionally."""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .guides import list_choices
from .node import (
    Node,
    Schema,
    find_element,
    find_member,
    iterate_children,
    iterate_nodes,
    list_applied,
    list_properties,
)


@dataclass(frozen=True, slots=True)
class Check:
    """A schema that a finished value has to satisfy.

    Attributes:
        node: the schema.
        keywords: the keywords in it that no engine enforces, for messages.
        is_distinct: not the schema, but that the value is none of those before it in the array.
    """

    node: Node
    keywords: tuple[str, ...]
    is_distinct: bool = False


@dataclass(slots=True, eq=False)
class Place:
    """A place in an instance: the nodes that surely apply there.

    Attributes:
        checks: what a value at this place is checked against when it is complete.
        has_children: a residual keyword applies surely below this place too.
        names: the place of property names, as strings; None when they are not checked.
        distinct: the checks of an element's own, when elements have to be distinct.
        choices: the values that a schema here lists, for an element that is compared with its siblings; None for
            many, and where it is not.
    """

    map: "PlaceMap | None"
    nodes: frozenset[Node]
    checks: tuple[Check, ...]
    has_children: bool
    names: "Place | None" = None
    distinct: tuple[Check, ...] = ()
    choices: list[Any] | None = None
    _names: dict[str | None, "Place | None"] = field(default_factory=dict)
    _elements: dict[int, "Place | None"] = field(default_factory=dict)

    def member(self, name: str) -> "Place | None":
        """Return the place of a property's value, None when nothing is checked there or below."""
        known = name if any(name in list_properties(node) for node in self.nodes) else None
        if known not in self._names:
            assert self.map is not None, "names have no members"
            self._names[known] = self.map.find([find_member(node.keywords, name) for node in self.nodes])
        return self._names[known]

    def element(self, index: int) -> "Place | None":
        """Return the place of an array's element, None when nothing is checked there or below."""
        assert self.map is not None, "names have no elements"
        index = min(index, self.map.num_places)
        if index not in self._elements:
            found = [find_element(node.keywords, index) for node in self.nodes]
            self._elements[index] = self.map.find(found, self.distinct)
        return self._elements[index]


class PlaceMap:
    """The places of one document. Not locked: a place that two threads find at once is only built twice.

    Args:
        dropped: node -> the keywords in it that no engine enforces.
    """

    def __init__(self, root: Node, dropped: Mapping[Node, Iterable[str]]) -> None:
        self._dropped = {node: tuple(keywords) for node, keywords in dropped.items()}
        self._places: dict[tuple[frozenset[Node], tuple[Check, ...]], Place | None] = {}
        self._reachable: dict[Node, frozenset[str]] = {}
        self.num_places = 0
        found = self._make(expand([root]), ())
        every = tuple(dict.fromkeys(keyword for names in self._dropped.values() for keyword in names))
        # The whole document is checked in any case.
        self.root_check = Check(root, every)
        others = (each for each in found.checks if each.node is not root)
        self.root = replace(found, checks=(self.root_check, *others))

    def find(self, starts: Iterable[Schema | None], extra: tuple[Check, ...] = ()) -> Place | None:
        """Return the place to which all these schemas apply, None when nothing is checked there or below.

        Args:
            extra: what is checked there beside the schemas.
        """
        key = expand(starts), extra
        if key not in self._places:
            place = self._make(*key)
            self._places[key] = place if place.checks or place.has_children else None
        return self._places[key]

    def _make(self, nodes: frozenset[Node], extra: tuple[Check, ...]) -> Place:
        ordered = sorted(nodes, key=lambda node: node.pointer)
        checks = [check for node in ordered if (check := self._make_check(node)) is not None]
        distinct = [node for node in ordered if self._is_left(node, "uniqueItems")]
        named = [node.keywords["propertyNames"] for node in ordered if self._is_left(node, "propertyNames")]
        listed = [each for each in named if isinstance(each, Node)]
        about_names = tuple(Check(node, ("propertyNames",)) for node in listed)
        names = Place(None, frozenset(listed), about_names, False) if listed else None
        is_above = any(self._reach(child) for node in nodes for child in self._list_sure(node))
        return Place(
            map=self, nodes=nodes, checks=(*extra, *checks),
            has_children=is_above or bool(distinct) or names is not None, names=names,
            distinct=tuple(Check(node, ("uniqueItems",), True) for node in distinct),
            choices=list_choices(nodes) if extra else None,
        )

    def _is_left(self, node: Node, keyword: str) -> bool:
        return keyword in self._dropped.get(node, ()) and node.get(keyword, False) is not False

    def _list_sure(self, node: Node) -> list[Schema]:
        """Return the schemas that certainly apply to some member or element."""
        self.num_places = max(self.num_places, len(node.get("prefixItems", ())))
        others = [] if "patternProperties" in node.keywords else [node.get("additionalProperties", True)]
        places, items = node.get("prefixItems", ()), node.get("items", True)
        return [*list_properties(node).values(), *others, *places, items]

    def _make_check(self, node: Node) -> Check | None:
        """Return the check of a node: its own residual keywords, and those that apply under a condition."""
        keywords, sure = [*self._dropped.get(node, ())], {id(child) for child in self._list_sure(node)}
        for path, child in iterate_children(node):
            if path[0] != "allOf" and id(child) not in sure:
                keywords.extend(self._reach(child))
        names = dict.fromkeys(node.written_name(keyword) for keyword in keywords)
        return Check(node, tuple(names)) if keywords else None

    def _reach(self, start: Schema) -> frozenset[str]:
        """Return the residual keywords in a schema and everything below it, references followed."""
        if not isinstance(start, Node):
            return frozenset()
        if start not in self._reachable:
            found = (self._dropped.get(node, ()) for node in iterate_nodes([start]))
            self._reachable[start] = frozenset(itertools.chain.from_iterable(found))
        return self._reachable[start]


def expand(starts: Iterable[Schema | None]) -> frozenset[Node]:
    """Return schemas and what they demand of the same value without condition."""
    found: set[Node] = set()
    pending = list(starts)
    while pending:
        node = pending.pop()
        if isinstance(node, Node) and node not in found:
            found.add(node)
            pending.extend(list_applied(node))
    return frozenset(found)
