"""Where in an instance the residual keywords of a schema apply, whatever else the instance holds."""

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .check import Check, is_about_names
from .deciding import ANYTHING, NOTHING, Item, Telling, TellingMap
from .keywords import iterate_children, join_pointer
from .references import find_demands, find_targets, item_keywords, walk
from .weaken import find_at

# How far down few values are looked for.
MAX_DEPTH = 4


@dataclass(slots=True, eq=False)
class Site:
    """A place in an instance: the schemas that surely apply there.

    Attributes:
        checks: what a value at this place is checked against when it is complete.
        has_children: a residual keyword applies surely below this place too.
        telling: what decides checks at this place, or around it.
        names: the place of property names, as strings; None when they are not checked.
        distinct: the checks of an element's own, when elements have to be distinct.
        has_few: a schema there lists its values or bounds a number on both sides, or all its parts or branches do.
        strings: the JSON spelling of the strings on which a verdict may depend; None where it may on any.
    """

    map: "SiteMap"
    pointers: frozenset[str]
    checks: tuple[Check, ...]
    has_children: bool
    telling: Telling
    names: "Site | None" = None
    distinct: tuple[Check, ...] = ()
    has_few: bool = False
    strings: frozenset[bytes] | None = field(init=False)
    _names: dict[str | None, "Site | None"] = field(default_factory=dict)
    _places: dict[int, "Site | None"] = field(default_factory=dict)

    def __post_init__(self) -> None:
        found = self.telling.strings
        self.strings = None if found is None else frozenset(map(spell, found))

    def member(self, name: str) -> "Site | None":
        """Return the place of a property's value, None when nothing is checked there or below."""
        is_known = any(name in self.map.properties(p) for p in self.pointers)
        known: str | None = name if is_known or self.map.is_told(self.telling, name) else None
        if known not in self._names:
            found = (self.map.member_pointer(pointer, name) for pointer in self.pointers)
            self._names[known] = self.map.site(found, self.map.telling.member(self.telling, name))
        return self._names[known]

    def element(self, index: int) -> "Site | None":
        """Return the place of an array's element, None when nothing is checked there or below."""
        index = min(index, self.map.num_places)
        if index not in self._places:
            found = (self.map.element_pointer(pointer, index) for pointer in self.pointers)
            self._places[index] = self.map.site(found, self.map.telling.element(self.telling), self.distinct)
        return self._places[index]


def spell(text: str) -> bytes:
    """Return a string's inside as JSON has it."""
    return json.dumps(text, ensure_ascii=False)[1:-1].encode("utf-8", "surrogatepass")


class SiteMap:
    """The places of one document. Not locked: a place that two threads find at once is only built twice.

    Args:
        document: the schema as the user wrote it.
        residual: pointer of a schema -> the residual keywords in it.
        is_ref_alone: the document's draft ignores what stands beside `$ref`.
    """

    def __init__(self, document: Any, residual: Mapping[str, tuple[str, ...]], is_ref_alone: bool) -> None:
        self._document = document
        self._residual = residual
        self._is_ref_alone = is_ref_alone
        self._sites: dict[tuple[frozenset[str], Telling, tuple[Check, ...]], Site | None] = {}
        self._schemas: dict[str, dict[str, Any]] = {}
        self._reachable: dict[str, frozenset[str]] = {}
        self.num_places = 0
        self.telling = TellingMap(document, self._find)
        root = self.site([""], NOTHING) or self._make_site(frozenset([""]), NOTHING, ())
        every = tuple(dict.fromkeys(keyword for names in residual.values() for keyword in names))
        # The whole document is checked in any case.
        checks = (Check("", every), *(check for check in root.checks if check.pointer))
        self.root = replace(root, checks=checks)

    def site(self, pointers: Any, telling: Telling, extra: tuple[Check, ...] = ()) -> Site | None:
        """Return the place to which all these schemas apply, None when nothing is checked there or below.

        Args:
            telling: what decides checks around the place.
            extra: what is checked there beside the schemas.
        """
        found = frozenset(p for start in pointers if start is not None for p in self._expand(start))
        key = found, telling, extra
        if key not in self._sites:
            site = self._make_site(found, telling, extra)
            is_needed = site.checks or site.has_children or site.telling != NOTHING
            self._sites[key] = site if is_needed else None
        return self._sites[key]

    def _make_site(self, found: frozenset[str], telling: Telling, extra: tuple[Check, ...]) -> Site:
        checks = tuple(check for p in sorted(found) if (check := self._make_check(p)) is not None)
        items = [item for check in checks for item in self._list_live(check.pointer)]
        is_lost = any(keyword not in self._find(pointer) for pointer, keyword in items)
        here = ANYTHING if is_lost else self.telling.gather(telling, items)
        distinct = tuple(
            Check(p, ("uniqueItems",), True) for p in sorted(found) if self._is_left(p, "uniqueItems")
        )
        named = [join_pointer(p, "propertyNames") for p in sorted(found) if self._is_left(p, "propertyNames")]
        names = self._make_names(named, self._list_alone(found, checks))
        is_above = any(self._reach(child) for p in found for child in self._sure_children(p))
        has_children = is_above or bool(distinct or names)
        has_few = any(self._has_few(p, MAX_DEPTH) for p in found)
        return Site(self, found, (*extra, *checks), has_children, here, names, distinct, has_few)

    def _make_names(self, named: list[str], alone: tuple[Check, ...]) -> Site | None:
        """Return the place of an object's property names, None when they are not checked."""
        if not (named or alone):
            return None
        items = [item for pointer in named for item in self.telling.list_items(pointer)]
        told = ANYTHING if alone else self.telling.gather(NOTHING, items)
        checks = (*(Check(pointer, ("propertyNames",)) for pointer in named), *alone)
        return Site(self, frozenset(named), checks, False, told)

    def _list_alone(self, found: frozenset[str], checks: tuple[Check, ...]) -> tuple[Check, ...]:
        """Return the checks that the name decides, where an object has one property at most."""
        if not any(self._find(pointer).get("maxProperties") == 1 for pointer in found):
            return ()
        decided = (check for check in checks if is_about_names(self._find(check.pointer)))
        return tuple(replace(check, is_alone=True) for check in decided)

    def _has_few(self, pointer: str, depth: int) -> bool:
        """Tell whether a schema names its values, or those of all its parts."""
        schema = self._find(pointer)
        names, kind = schema.keys(), schema.get("type")
        is_bounded = names & {"minimum", "exclusiveMinimum"} and names & {"maximum", "exclusiveMaximum"}
        if names & {"enum", "const"} or is_bounded or kind in ("boolean", "null"):
            return True
        if depth > 0 and self._has_few_branches(pointer, schema, depth - 1):
            return True
        if kind == "object" and (
            schema.get("additionalProperties") is False or schema.get("maxProperties") == 0
        ):
            parts = [join_pointer(pointer, "properties", name) for name in self.properties(pointer)]
        elif kind == "array":
            rest = item_keywords(schema)[1]
            is_closed = schema.get(rest) is False
            if not is_closed and not ("maxItems" in schema and rest in schema):
                return False
            parts = [*self._sure_children(pointer)][: -1 if is_closed else None]
        else:
            parts = [*find_targets(schema)]
            if not parts:
                return False
        return depth > 0 and all(self._has_few(part, depth - 1) for part in parts)

    def _has_few_branches(self, pointer: str, schema: Mapping[str, Any], depth: int) -> bool:
        """Tell whether all the branches of a union name their values."""
        unions = [keyword for keyword in ("anyOf", "oneOf") if keyword in schema]
        branches = [[join_pointer(pointer, name, i) for i in range(len(schema[name]))] for name in unions]
        return any(all(self._has_few(branch, depth) for branch in union) for union in branches)

    def _is_left(self, pointer: str, keyword: str) -> bool:
        """Tell whether a keyword of a schema is left to the checks."""
        return (
            keyword in self._residual.get(pointer, ())
            and self._find(pointer).get(keyword, False) is not False
        )

    def is_told(self, telling: Telling, name: str) -> bool:
        """Tell whether a property has a schema of its own in what decides checks."""
        return any(keyword == "properties" and name in self.properties(p) for p, keyword in telling.items)

    def properties(self, pointer: str) -> Mapping[str, Any]:
        """Return the `properties` of a schema."""
        schema = self._find(pointer)
        found = schema.get("properties")
        return found if isinstance(found, dict) else {}

    def member_pointer(self, pointer: str, name: str) -> str | None:
        """Return the schema that surely applies to a property, None when that depends."""
        if name in self.properties(pointer):
            return join_pointer(pointer, "properties", name)
        schema = self._find(pointer)
        if "additionalProperties" in schema and "patternProperties" not in schema:
            return join_pointer(pointer, "additionalProperties")
        return None

    def element_pointer(self, pointer: str, index: int) -> str | None:
        """Return the schema that surely applies to an element, None when there is none."""
        schema = self._find(pointer)
        keyword, rest = item_keywords(schema)
        places = schema.get(keyword)
        if isinstance(places, list) and index < len(places):
            return join_pointer(pointer, keyword, index)
        return join_pointer(pointer, rest) if rest in schema else None

    def _find(self, pointer: str) -> dict[str, Any]:
        known = self._schemas.get(pointer)
        if known is None:
            found = find_at(self._document, pointer)
            known = found if isinstance(found, dict) else {}
            if self._is_ref_alone and isinstance(known.get("$ref"), str):
                known = {"$ref": known["$ref"]}
            self._schemas[pointer] = known
        return known

    def _expand(self, start: str) -> Iterator[str]:
        """Return a schema and what it demands of the same value without condition."""
        return walk([start], lambda pointer: find_demands(self._find(pointer), pointer))

    def _sure_children(self, pointer: str) -> Iterator[str]:
        schema = self._find(pointer)
        yield from (join_pointer(pointer, "properties", name) for name in self.properties(pointer))
        if "additionalProperties" in schema and "patternProperties" not in schema:
            yield join_pointer(pointer, "additionalProperties")
        keyword, rest = item_keywords(schema)
        places = schema.get(keyword)
        if isinstance(places, list):
            self.num_places = max(self.num_places, len(places))
            yield from (join_pointer(pointer, keyword, index) for index in range(len(places)))
        if rest in schema:
            yield join_pointer(pointer, rest)

    def _list_live(self, pointer: str) -> list[Item]:
        """Return the keywords of a checked schema whose verdict the engine has not settled."""
        keywords = dict.fromkeys(self._residual.get(pointer, ()))
        sure = {*self._sure_children(pointer)}
        for path, _ in iterate_children(self._find(pointer)):
            child = join_pointer(pointer, *path)
            if path[0] not in ("$defs", "definitions", "allOf") and child not in sure and self._reach(child):
                keywords[str(path[0])] = None
        return [(pointer, keyword) for keyword in keywords]

    def _make_check(self, pointer: str) -> Check | None:
        """Return the check of a schema: its own residual keywords, and those that apply under a condition."""
        keywords = list(self._residual.get(pointer, ()))
        schema = self._find(pointer)
        sure = {*self._sure_children(pointer)}
        for path, _ in iterate_children(schema):
            child = join_pointer(pointer, *path)
            if path[0] not in ("$defs", "definitions", "allOf") and child not in sure:
                keywords.extend(self._reach(child))
        return Check(pointer, tuple(dict.fromkeys(keywords))) if keywords else None

    def _below(self, pointer: str) -> Iterator[str]:
        schema = self._find(pointer)
        yield from find_targets(schema)
        for path, _ in iterate_children(schema):
            if path[0] not in ("$defs", "definitions"):
                yield join_pointer(pointer, *path)

    def _reach(self, start: str) -> frozenset[str]:
        """Return the residual keywords in a schema and everything below it, references followed."""
        if start not in self._reachable:
            found = (self._residual.get(pointer, ()) for pointer in walk([start], self._below))
            self._reachable[start] = frozenset(itertools.chain.from_iterable(found))
        return self._reachable[start]
