"""Where in an instance the residual keywords of a schema apply, whatever else the instance holds."""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from .deciding import ANYTHING, NOTHING, Deciding, Item, gather, list_items
from .node import Node, Schema, iterate_children, iterate_nodes, list_applied, list_properties

_ABOUT_NAMES = frozenset(
    [
        *("not", "allOf", "anyOf", "oneOf", "type", "propertyNames", "required", "dependentRequired"),
        *("minProperties", "maxProperties"),
    ]
)
# How far down few values are looked for.
MAX_DEPTH = 4


@dataclass(frozen=True, slots=True)
class Check:
    """A schema that a finished value has to satisfy.

    Attributes:
        node: the schema.
        keywords: the keywords in it that no engine enforces, for messages.
        is_distinct: not the schema, but that the value is none of those before it in the array.
        is_alone: what is checked is a name, as the only property of an object.
    """

    node: Node
    keywords: tuple[str, ...]
    is_distinct: bool = False
    is_alone: bool = False


@dataclass(slots=True, eq=False)
class Place:
    """A place in an instance: the nodes that surely apply there.

    Attributes:
        checks: what a value at this place is checked against when it is complete.
        has_children: a residual keyword applies surely below this place too.
        deciding: what decides checks at this place, or around it.
        names: the place of property names, as strings; None when they are not checked.
        distinct: the checks of an element's own, when elements have to be distinct.
        has_few: a node there lists its values or bounds a number on both sides, or all its parts or branches do.
        strings: the JSON spelling of the strings on which a verdict may depend; None where it may on any.
    """

    map: "PlaceMap | None"
    nodes: frozenset[Node]
    checks: tuple[Check, ...]
    has_children: bool
    deciding: Deciding
    names: "Place | None" = None
    distinct: tuple[Check, ...] = ()
    has_few: bool = False
    strings: frozenset[bytes] | None = field(init=False)
    _names: dict[str | None, "Place | None"] = field(default_factory=dict)
    _places: dict[int, "Place | None"] = field(default_factory=dict)

    def __post_init__(self) -> None:
        found = self.deciding.strings
        self.strings = None if found is None else frozenset(map(spell, found))

    def member(self, name: str) -> "Place | None":
        """Return the place of a property's value, None when nothing is checked there or below."""
        is_known = any(name in list_properties(node) for node in self.nodes)
        known: str | None = name if is_known or self.deciding.lists(name) else None
        if known not in self._names:
            found = (find_member(node, name) for node in self.nodes)
            assert self.map is not None, "names have no members"
            self._names[known] = self.map.find(found, self.deciding.member(name))
        return self._names[known]

    def element(self, index: int) -> "Place | None":
        """Return the place of an array's element, None when nothing is checked there or below."""
        assert self.map is not None, "names have no elements"
        index = min(index, self.map.num_places)
        if index not in self._places:
            found = (find_element(node, index) for node in self.nodes)
            self._places[index] = self.map.find(found, self.deciding.element(), self.distinct)
        return self._places[index]


def spell(text: str) -> bytes:
    """Return a string's inside as JSON has it."""
    return json.dumps(text, ensure_ascii=False)[1:-1].encode("utf-8", "surrogatepass")


class PlaceMap:
    """The places of one document. Not locked: a place that two threads find at once is only built twice.

    Args:
        dropped: node -> the keywords in it that no engine enforces.
    """

    def __init__(self, root: Node, dropped: Mapping[Node, Iterable[str]]) -> None:
        self._dropped = {node: tuple(keywords) for node, keywords in dropped.items()}
        self._places: dict[tuple[frozenset[Node], Deciding, tuple[Check, ...]], Place | None] = {}
        self._reachable: dict[Node, frozenset[str]] = {}
        self.num_places = 0
        found = self.find([root], NOTHING) or self._make(frozenset([root]), NOTHING, ())
        every = tuple(dict.fromkeys(keyword for names in self._dropped.values() for keyword in names))
        # The whole document is checked in any case.
        self.root_check = Check(root, every)
        self.root = replace(
            found, checks=(self.root_check, *(each for each in found.checks if each.node is not root))
        )

    def find(
        self, starts: Iterable[Schema | None], deciding: Deciding, extra: tuple[Check, ...] = ()
    ) -> Place | None:
        """Return the place to which all these schemas apply, None when nothing is checked there or below.

        Args:
            deciding: what decides checks around the place.
            extra: what is checked there beside the schemas.
        """
        found = expand(starts)
        key = found, deciding, extra
        if key not in self._places:
            place = self._make(found, deciding, extra)
            is_needed = place.checks or place.has_children or place.deciding != NOTHING
            self._places[key] = place if is_needed else None
        return self._places[key]

    def _make(self, found: frozenset[Node], deciding: Deciding, extra: tuple[Check, ...]) -> Place:
        ordered = sorted(found, key=lambda node: node.pointer)
        checks = tuple(check for node in ordered if (check := self._make_check(node)) is not None)
        here = gather(deciding, [item for check in checks for item in self._list_live(check.node)])
        distinct = tuple(
            Check(node, ("uniqueItems",), True) for node in ordered if self._is_left(node, "uniqueItems")
        )
        named = [node.keywords["propertyNames"] for node in ordered if self._is_left(node, "propertyNames")]
        alone = list_alone(found, checks)
        names = make_names([each for each in named if isinstance(each, Node)], alone)
        is_above = any(self._reach(child) for node in found for child in self._list_sure(node))
        has_few = any(has_few_values(node, MAX_DEPTH) for node in found)
        has_children = is_above or bool(distinct or names)
        return Place(self, found, (*extra, *checks), has_children, here, names, distinct, has_few)

    def _is_left(self, node: Node, keyword: str) -> bool:
        """Tell whether a keyword of a node is left to the checks."""
        return keyword in self._dropped.get(node, ()) and node.get(keyword, False) is not False

    def _list_sure(self, node: Node) -> list[Schema]:
        """Return the schemas that surely apply to some member or element."""
        self.num_places = max(self.num_places, len(node.get("prefixItems", ())))
        others = [] if "patternProperties" in node.keywords else [node.get("additionalProperties", True)]
        return [
            *list_properties(node).values(),
            *others,
            *node.get("prefixItems", ()),
            node.get("items", True),
        ]

    def _list_conditional(self, node: Node) -> Iterator[tuple[str, Schema]]:
        """Yield (keyword, schema) of what applies under a condition, or to a part that the value itself decides."""
        sure = {id(child) for child in self._list_sure(node)}
        for path, child in iterate_children(node):
            if path[0] != "allOf" and id(child) not in sure:
                yield path[0], child

    def _list_live(self, node: Node) -> list[Item]:
        """Return the keywords of a checked node whose verdict the engine has not settled."""
        keywords = dict.fromkeys(self._dropped.get(node, ()))
        keywords.update(
            (keyword, None) for keyword, child in self._list_conditional(node) if self._reach(child)
        )
        return [(node, keyword) for keyword in keywords]

    def _make_check(self, node: Node) -> Check | None:
        """Return the check of a node: its own residual keywords, and those that apply under a condition."""
        keywords = [*self._dropped.get(node, ())]
        for _, child in self._list_conditional(node):
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


def make_names(named: list[Node], alone: tuple[Check, ...]) -> Place | None:
    """Return the place of an object's property names, None when they are not checked."""
    if not (named or alone):
        return None
    told = ANYTHING if alone else gather(NOTHING, [item for node in named for item in list_items(node)])
    checks = (*(Check(node, ("propertyNames",)) for node in named), *alone)
    return Place(None, frozenset(named), checks, False, told)


def list_alone(found: frozenset[Node], checks: tuple[Check, ...]) -> tuple[Check, ...]:
    """Return the checks that the name decides, where an object has one property at most."""
    if not any(node.get("maxProperties") == 1 for node in found):
        return ()
    return tuple(replace(check, is_alone=True) for check in checks if is_about_names(check.node))


def is_about_names(schema: Schema) -> bool:
    """Tell whether only the names of an object decide on it."""
    if not isinstance(schema, Node):
        return True
    if not schema.keywords.keys() <= _ABOUT_NAMES or schema.get("type", "object") != "object":
        return False
    branches = (child for path, child in iterate_children(schema) if path[0] != "propertyNames")
    return all(map(is_about_names, branches))


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


def find_member(node: Node, name: str) -> Schema | None:
    """Return the schema that surely applies to a property, None when that depends."""
    properties = list_properties(node)
    if name in properties:
        return properties[name]
    return None if "patternProperties" in node.keywords else node.get("additionalProperties")


def find_element(node: Node, index: int) -> Schema | None:
    """Return the schema that surely applies to an element, None when there is none."""
    places = node.get("prefixItems", ())
    found: Schema | None = places[index] if index < len(places) else node.get("items")
    return found


def has_few_values(schema: Schema, depth: int) -> bool:
    """Tell whether a schema names its values, or those of all its parts."""
    if not isinstance(schema, Node):
        return schema is False
    names, kind = schema.keywords.keys(), schema.get("type")
    is_bounded = names & {"minimum", "exclusiveMinimum"} and names & {"maximum", "exclusiveMaximum"}
    if names & {"enum", "const"} or is_bounded or kind in ("boolean", "null"):
        return True
    if depth == 0:
        return False
    unions = [schema.keywords[keyword] for keyword in ("anyOf", "oneOf") if keyword in names]
    if any(all(has_few_values(branch, depth - 1) for branch in union) for union in unions):
        return True
    parts: list[Schema]
    if kind == "object" and (schema.get("additionalProperties") is False or schema.get("maxProperties") == 0):
        parts = list(list_properties(schema).values())
    elif kind == "array" and schema.get("items", True) is False:
        parts = list(schema.get("prefixItems", ()))
    elif kind == "array" and "maxItems" in names and "items" in names:
        parts = [*schema.get("prefixItems", ()), schema.keywords["items"]]
    elif "$ref" in names:
        parts = [schema.keywords["$ref"]]
    else:
        return False
    return all(has_few_values(part, depth - 1) for part in parts)
