"""Where in an instance strings have to be quotations: the schemas with `"x-grounded": true`.

The annotation counts where it surely applies: at the root, through properties, additionalProperties, items, allOf
and $ref, and in a branch of anyOf or oneOf that is the only one to take a string (or the object or array around
it). Where it would apply only under another condition it is refused.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import UnsupportedGrammar
from .keywords import TYPES_OF_KEYWORD
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
from .rules import GROUNDED, allowed_types, types_of

Kind = Literal["string", "object", "array"]
KINDS: tuple[Kind, ...] = ("string", "object", "array")
Nodes = frozenset[Node]

MAX_NUM_PLACES = 5_000
_CONDITION = "it would apply only under a condition; it can stand below properties, items, allOf and $ref"
# Keywords allowed on a grounded string; with any others, no quotation might be valid.
_BESIDE = frozenset([GROUNDED, "type", "minLength", "maxLength", "$ref", "allOf", "anyOf", "oneOf"])
# Placeholder for the properties that are not listed.
UNLISTED = "\udfff"


@dataclass(frozen=True, slots=True)
class Lengths:
    """How many characters a quotation may have; `most` None is any number."""

    least: int = 0
    most: int | None = None


class GroundedPlace:
    """A place in an instance where strings, there or below, have to be quotations.

    Attributes:
        lengths: how long the quotation may be, None where strings are free.
        members: name -> the place of that property, None where strings are free; of all others under UNLISTED.
        elements: the places of an array's elements, the last one also that of all others.
        names: property names are free.
    """

    names: None = None

    def __init__(self, lengths: Lengths | None) -> None:
        self.lengths = lengths
        self.checks: tuple[Any, ...] = () if lengths is None else (self,)
        self.members: dict[str, GroundedPlace | None] = {}
        self.elements: list[GroundedPlace | None] = []
        self.has_children = False

    def member(self, name: str) -> "GroundedPlace | None":
        """Return the place of a property's value, None when strings are free there and below."""
        return self.members[name if name in self.members else UNLISTED]

    def element(self, index: int) -> "GroundedPlace | None":
        """Return the place of an array's element, None when strings are free there and below."""
        return self.elements[min(index, len(self.elements) - 1)]


class GroundingMap:
    """The places of one document that has the annotation.

    Attributes:
        nodes: the nodes with the annotation.
        lengths: (pointer of a node, lengths) of each place with grounded strings.

    Raises:
        UnsupportedGrammar: the annotation stands where it cannot be enforced, or beside what cannot be met too.
    """

    def __init__(self, root: Node) -> None:
        every = list(iterate_nodes([root]))
        self.nodes = [node for node in every if GROUNDED in node.keywords]
        self.lengths: list[tuple[str, Lengths]] = []
        self._num_elements = 1 + max(len(node.get("prefixItems", ())) for node in every)
        self._grounded: dict[Node, Node | None] = {}
        start = frozenset([root])
        self.root = self._find_places(start).get(start)

    def _find_places(self, root: Nodes) -> dict[Nodes, GroundedPlace]:
        """Return the places where all nodes of a set apply; an annotation under a condition is refused."""
        places: dict[Nodes, GroundedPlace] = {}
        children: list[tuple[GroundedPlace, dict[str, Nodes], list[Nodes]]] = []
        pending = [root]
        while pending:
            starts = pending.pop()
            if starts in places or not any(map(self._find_grounded, starts)):
                continue
            if len(places) == MAX_NUM_PLACES:
                raise UnsupportedGrammar("", GROUNDED, f"the schema has more than {MAX_NUM_PLACES} places")
            members = {name: find_members(starts, name) for name in [*list_names(starts), UNLISTED]}
            elements = [find_elements(starts, index) for index in range(self._num_elements)]
            self._check_conditions(starts, frozenset().union(*members.values(), *elements))
            place = places[starts] = GroundedPlace(find_lengths(starts))
            if place.lengths is not None:
                self.lengths.append((min(node.pointer for node in starts), place.lengths))
            children.append((place, members, elements))
            pending += [*members.values(), *elements]
        for place, members, elements in children:
            place.members = {name: places.get(found) for name, found in members.items()}
            place.elements = [places.get(found) for found in elements]
            place.has_children = any([*place.members.values(), *place.elements])
        return places

    def _find_grounded(self, start: Node) -> Node | None:
        """Return an annotated node in or below a node, references followed."""
        if start not in self._grounded:
            below = (node for node in iterate_nodes([start]) if GROUNDED in node.keywords)
            self._grounded[start] = next(below, None)
        return self._grounded[start]

    def _check_conditions(self, starts: Nodes, children: Nodes) -> None:
        sure = {kind: expand(starts, kind) for kind in KINDS}
        followed = children.union(*sure.values())
        for node in frozenset().union(*sure.values()):
            for _, child in iterate_children(node):
                if isinstance(child, Node) and child not in followed:
                    self._refuse_below([child])
        for kind in KINDS:
            for node, keyword in itertools.product(sure[kind], ("anyOf", "oneOf")):
                fitting = list_fitting(node, keyword, kind)
                if len(fitting) > 1:
                    self._refuse_below(fitting)

    def _refuse_below(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            if (found := self._find_grounded(node)) is not None:
                raise UnsupportedGrammar(found.pointer, GROUNDED, _CONDITION)


def find_lengths(starts: Nodes) -> Lengths | None:
    """Return how long a quotation at a place may be, None where strings are free."""
    nodes = expand(starts, "string")
    if not any(GROUNDED in node.keywords for node in nodes):
        return None
    for node in nodes:
        for keyword in node.keywords:
            if keyword not in _BESIDE and "string" in TYPES_OF_KEYWORD.get(keyword, KINDS):
                raise UnsupportedGrammar(node.pointer, keyword, f"it may leave no quotation for {GROUNDED}")
    most = [int(node.keywords["maxLength"]) for node in nodes if "maxLength" in node.keywords]
    return Lengths(max(int(node.get("minLength", 0)) for node in nodes), min(most, default=None))


def list_names(starts: Nodes) -> list[str]:
    """Return the property names that nodes at a place list."""
    return list(dict.fromkeys(name for node in expand(starts, "object") for name in list_properties(node)))


def find_members(starts: Nodes, name: str) -> Nodes:
    """Return the nodes that surely apply to a property."""
    found = (find_member(node.keywords, name) for node in expand(starts, "object"))
    return frozenset(each for each in found if isinstance(each, Node))


def find_elements(starts: Nodes, index: int) -> Nodes:
    """Return the nodes that surely apply to an element."""
    found = (find_element(node.keywords, index) for node in expand(starts, "array"))
    return frozenset(each for each in found if isinstance(each, Node))


def expand(starts: Iterable[Schema], kind: Kind) -> Nodes:
    """Return the nodes that surely apply to a value of a kind."""
    found: set[Node] = set()
    pending = list(starts)
    while pending:
        node = pending.pop()
        if isinstance(node, Node) and node not in found:
            found.add(node)
            pending.extend(list_applied(node))
            for keyword in ("anyOf", "oneOf"):
                fitting = list_fitting(node, keyword, kind)
                pending.extend(fitting if len(fitting) == 1 else ())
    return frozenset(found)


def list_fitting(node: Node, keyword: str, kind: Kind) -> list[Node]:
    """Return the branches that may take a value of a kind."""
    branches: list[Schema] = [branch for branch in node.get(keyword, ()) if takes(branch, kind, frozenset())]
    # A branch that is `true` accepts everything and requires nothing.
    return [branch if isinstance(branch, Node) else Node("", {}) for branch in branches]


def takes(schema: Schema, kind: Kind, seen: Nodes) -> bool:
    """Return whether a schema may accept a value of a kind."""
    if not isinstance(schema, Node):
        return schema
    if schema in seen:
        return True
    types = allowed_types(schema)
    if types is not None and kind not in types:
        return False
    values = [schema.keywords["const"]] if "const" in schema.keywords else schema.get("enum")
    if isinstance(values, list) and not any(kind in types_of(value) for value in values):
        return False
    return all(takes(each, kind, seen | {schema}) for each in list_applied(schema))
