"""Where in an instance a residual check applies unconditionally."""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .count_guides import list_choices
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

# Assertions whose result may differ between any two strings.
_ANY_STRING = frozenset(["pattern", "format", "minLength", "maxLength", "uniqueItems"])
_VALUES = frozenset(["const", "enum"])
_UNEVALUATED = ("unevaluatedItems", "unevaluatedProperties")
# Strings on which a verdict may depend, in JSON's spelling; None where it may depend on any.
Strings = frozenset[bytes] | None
NO_STRINGS: frozenset[bytes] = frozenset()


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
        strings: the strings on which a check at this place, or around it, may depend.
        names: the place of property names, as strings; None when they are not checked.
        distinct: the checks of an element's own, when elements have to be distinct.
        is_compared: a value here is compared with its siblings.
        choices: the values that a schema here lists, for an element that is compared with its siblings; None for
            many, and where it is not.
    """

    map: "PlaceMap | None"
    nodes: frozenset[Node]
    checks: tuple[Check, ...]
    has_children: bool
    strings: Strings
    names: "Place | None" = None
    distinct: tuple[Check, ...] = ()
    is_compared: bool = False
    choices: list[Any] | None = None
    _names: dict[str | None, "Place | None"] = field(default_factory=dict)
    _elements: dict[int, "Place | None"] = field(default_factory=dict)

    def member(self, name: str) -> "Place | None":
        """Return the place of a property's value, None when nothing is checked there or below."""
        known = name if any(name in list_properties(node) for node in self.nodes) else None
        if known not in self._names:
            assert self.map is not None, "names have no members"
            self._names[known] = self.map.find([find_member(node.keywords, name) for node in self.nodes], self)
        return self._names[known]

    def element(self, index: int) -> "Place | None":
        """Return the place of an array's element, None when nothing is checked there or below."""
        assert self.map is not None, "names have no elements"
        index = min(index, self.map.num_places)
        if index not in self._elements:
            found = [find_element(node.keywords, index) for node in self.nodes]
            self._elements[index] = self.map.find(found, self, self.distinct)
        return self._elements[index]


class PlaceMap:
    """The places of one document. Not locked: a place that two threads find at once is only built twice.

    Args:
        dropped: node -> the keywords in it that no engine enforces.
    """

    def __init__(self, root: Node, dropped: Mapping[Node, Iterable[str]]) -> None:
        self._dropped = {node: tuple(keywords) for node, keywords in dropped.items()}
        self._places: dict[tuple[frozenset[Node], Strings, tuple[Check, ...]], Place | None] = {}
        self._reachable: dict[Node, frozenset[str]] = {}
        self.num_places = 0
        found = self._make(expand([root]), NO_STRINGS, ())
        every = tuple(dict.fromkeys(keyword for names in self._dropped.values() for keyword in names))
        # The whole document is checked in any case.
        self.root_check = Check(root, every)
        others = (each for each in found.checks if each.node is not root)
        self.root = replace(found, checks=(self.root_check, *others))

    def find(self, starts: Iterable[Schema | None], around: Place, extra: tuple[Check, ...] = ()) -> Place | None:
        """Return the place to which all these schemas apply, None when nothing is checked there or below.

        Args:
            extra: what is checked there beside the schemas.
        """
        # A value that is compared with others is compared including everything it contains.
        strings = None if around.is_compared else around.strings
        key = expand(starts), strings, extra
        if key not in self._places:
            place = self._make(*key)
            is_needed = place.checks or place.has_children or place.strings != NO_STRINGS
            self._places[key] = place if is_needed else None
        return self._places[key]

    def _make(self, nodes: frozenset[Node], strings: Strings, extra: tuple[Check, ...]) -> Place:
        ordered = sorted(nodes, key=lambda node: node.pointer)
        checks = [check for node in ordered if (check := self._make_check(node)) is not None]
        strings = join(strings, *(self._list_deciding(check.node) for check in checks))
        distinct = [node for node in ordered if self._is_left(node, "uniqueItems")]
        named = [node.keywords["propertyNames"] for node in ordered if self._is_left(node, "propertyNames")]
        names = make_names([each for each in named if isinstance(each, Node)])
        is_above = any(self._reach(child) for node in nodes for child in self._list_sure(node))
        return Place(
            map=self, nodes=nodes, checks=(*extra, *checks),
            has_children=is_above or bool(distinct) or names is not None, strings=strings, names=names,
            distinct=tuple(Check(node, ("uniqueItems",), True) for node in distinct), is_compared=bool(extra),
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

    def _list_conditional(self, node: Node) -> Iterator[Schema]:
        """Yield the schemas that apply conditionally, or to a part that the value itself determines."""
        sure = {id(child) for child in self._list_sure(node)}
        for path, child in iterate_children(node):
            if path[0] != "allOf" and id(child) not in sure:
                yield child

    def _list_deciding(self, node: Node) -> Strings:
        """Return the strings on which the check of a node may depend: the engine has settled what it enforces."""
        dropped = self._dropped.get(node, ())
        if any(keyword in dropped for keyword in _UNEVALUATED):
            # The valid branches determine what counts as evaluated.
            return join(*(list_strings(node, keyword) for keyword in node.keywords))
        own = [list_strings(node, keyword) for keyword in dropped if keyword != "uniqueItems"]
        below = Node("", {"allOf": [child for child in self._list_conditional(node) if self._reach(child)]})
        return join(*own, list_strings(below, "allOf"))

    def _make_check(self, node: Node) -> Check | None:
        """Return the check of a node: its own residual keywords, and those that apply under a condition."""
        keywords = [*self._dropped.get(node, ())]
        for child in self._list_conditional(node):
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


def make_names(named: list[Node]) -> Place | None:
    """Return the place of an object's property names, None when they are not checked."""
    if not named:
        return None
    strings = join(*(list_strings(node, keyword) for node in named for keyword in node.keywords))
    return Place(None, frozenset(named), tuple(Check(node, ("propertyNames",)) for node in named), False, strings)


def join(*found: Strings) -> Strings:
    """Return all strings on which one of several verdicts may depend."""
    return None if None in found else NO_STRINGS.union(*(each or () for each in found))


def list_strings(node: Node, keyword: str) -> Strings:
    """Return the strings on which a keyword of a node may depend, with what stands below it."""
    value = node.keywords[keyword]
    if keyword in _ANY_STRING:
        return None
    if keyword in _VALUES:
        values: list[Any] = value if keyword == "enum" else [value]
        if any(isinstance(each, dict | list) for each in values):
            return None
        return frozenset(spell(each) for each in values if isinstance(each, str))
    if keyword == "propertyNames":
        # Property names have a place of their own.
        return NO_STRINGS
    starts = [child for path, child in iterate_children(node) if path[0] == keyword]
    below = iterate_nodes([value] if keyword == "$ref" else starts)
    asserted = ((each, name) for each in below for name in each.keywords if name in _VALUES | _ANY_STRING)
    return join(*(list_strings(each, name) for each, name in asserted))


def spell(text: str) -> bytes:
    """Return a string's inside as JSON has it."""
    return json.dumps(text, ensure_ascii=False)[1:-1].encode("utf-8", "surrogatepass")


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
