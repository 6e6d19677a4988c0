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
from .node import Node, Schema, iterate_children, iterate_nodes, list_applied, list_properties
from .places import find_element, find_member
from .rules import GROUNDED, allowed_types, types_of

Kind = Literal["string", "object", "array"]
KINDS: tuple[Kind, ...] = ("string", "object", "array")
Nodes = frozenset[Node]

MAX_NUM_PLACES = 5_000
_CONDITION = "it would apply only under a condition; it can stand below properties, items, allOf and $ref"
# What else may be said about a grounded string: anything more could leave no quotation that fits.
_BESIDE = frozenset([GROUNDED, "type", "minLength", "maxLength", "$ref", "allOf", "anyOf", "oneOf"])
# The name of no property, for what applies to those that are not listed.
_UNLISTED = "\udfff"


@dataclass(frozen=True, slots=True)
class Lengths:
    """How many characters a quotation may have; `most` None is any number."""

    least: int = 0
    most: int | None = None


class GroundedPlace:
    """A place in an instance: the nodes that surely apply there.

    Attributes:
        lengths: how long the quotation may be, None where strings are free.
        has_children: strings below have to be quotations too.
        names: property names are free.
    """

    names: None = None

    def __init__(self, map: "GroundingMap", starts: Nodes) -> None:
        self._map = map
        self._starts = starts
        self.lengths = find_lengths(starts)
        self.checks: tuple[Any, ...] = () if self.lengths is None else (self,)
        self.has_children = any(map.find_grounded(child) for child in map.list_children(starts))
        self._names: dict[str, GroundedPlace | None] = {}
        self._places: dict[int, GroundedPlace | None] = {}

    def member(self, name: str) -> "GroundedPlace | None":
        """Return the place of a property's value, None when strings are free there and below."""
        known = name if name in list_names(self._starts) else _UNLISTED
        if known not in self._names:
            self._names[known] = self._map.find(find_members(self._starts, known))
        return self._names[known]

    def element(self, index: int) -> "GroundedPlace | None":
        """Return the place of an array's element, None when strings are free there and below."""
        index = min(index, self._map.num_places)
        if index not in self._places:
            self._places[index] = self._map.find(find_elements(self._starts, index))
        return self._places[index]


class GroundingMap:
    """The places of one document that has the annotation.

    Attributes:
        nodes: the nodes with the annotation.

    Raises:
        UnsupportedGrammar: the annotation stands where it cannot be enforced, or beside what cannot be met too.
    """

    def __init__(self, root: Node) -> None:
        every = list(iterate_nodes([root]))
        self.nodes = [node for node in every if GROUNDED in node.keywords]
        self.num_places = max(len(node.get("prefixItems", ())) for node in every)
        self._found: dict[Nodes, GroundedPlace | None] = {}
        self._grounded: dict[Node, Node | None] = {}
        self._seen: set[Nodes] = set()
        self._check_places(frozenset([root]))
        self.root = self.find(frozenset([root]))

    def find(self, starts: Nodes) -> GroundedPlace | None:
        """Return the place to which all these nodes apply."""
        if starts not in self._found:
            place = GroundedPlace(self, starts)
            self._found[starts] = place if place.checks or place.has_children else None
        return self._found[starts]

    def list_lengths(self) -> list[tuple[str, Lengths]]:
        """Return (pointer of a node, lengths) of each place with grounded strings."""
        found = ((min(node.pointer for node in starts), find_lengths(starts)) for starts in self._seen)
        return [(pointer, lengths) for pointer, lengths in found if lengths is not None]

    def list_children(self, starts: Nodes) -> Nodes:
        """Return the nodes that surely apply to some member or element of a place."""
        members = [find_members(starts, name) for name in [*list_names(starts), _UNLISTED]]
        elements = [find_elements(starts, index) for index in range(self.num_places + 1)]
        return frozenset().union(*members, *elements)

    def find_grounded(self, start: Node) -> Node | None:
        """Return an annotated node in or below a node, references followed."""
        if start not in self._grounded:
            below = (node for node in iterate_nodes([start]) if GROUNDED in node.keywords)
            self._grounded[start] = next(below, None)
        return self._grounded[start]

    def _check_places(self, root: Nodes) -> None:
        """Go through all places and refuse an annotation under a condition."""
        pending = [root]
        while pending:
            starts = pending.pop()
            if starts in self._seen or not any(map(self.find_grounded, starts)):
                continue
            self._seen.add(starts)
            if len(self._seen) > MAX_NUM_PLACES:
                raise UnsupportedGrammar("", GROUNDED, f"the schema has more than {MAX_NUM_PLACES} places")
            self._check_conditions(starts)
            find_lengths(starts)
            pending.extend(find_members(starts, name) for name in [*list_names(starts), _UNLISTED])
            pending.extend(find_elements(starts, index) for index in range(self.num_places + 1))

    def _check_conditions(self, starts: Nodes) -> None:
        sure = {kind: expand(starts, kind) for kind in KINDS}
        followed = frozenset().union(*sure.values(), self.list_children(starts))
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
            if (found := self.find_grounded(node)) is not None:
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
    found = (find_member(node, name) for node in expand(starts, "object"))
    return frozenset(each for each in found if isinstance(each, Node))


def find_elements(starts: Nodes, index: int) -> Nodes:
    """Return the nodes that surely apply to an element."""
    found = (find_element(node, index) for node in expand(starts, "array"))
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
    # A branch that is `true` takes everything and says nothing.
    return [branch if isinstance(branch, Node) else Node("", {}) for branch in branches]


def takes(schema: Schema, kind: Kind, seen: Nodes) -> bool:
    """Tell whether a schema may take a value of a kind."""
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
