"""Where in an instance the residual keywords of a schema apply, whatever else the instance holds."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from .keywords import iterate_children, join_pointer, split_pointer
from .loosen import find_at


@dataclass(frozen=True, slots=True)
class Check:
    """A schema that a finished value has to satisfy.

    Attributes:
        pointer: where the user wrote it.
        keywords: the residual keywords in it, for messages.
    """

    pointer: str
    keywords: tuple[str, ...]


@dataclass(slots=True, eq=False)
class Site:
    """A place in an instance: the schemas that surely apply there.

    Attributes:
        checks: what a value at this place is checked against when it is complete.
        has_children: a residual keyword applies surely below this place too.
    """

    map: "SiteMap"
    pointers: frozenset[str]
    checks: tuple[Check, ...]
    has_children: bool
    _names: dict[str | None, "Site | None"] = field(default_factory=dict)
    _places: dict[int, "Site | None"] = field(default_factory=dict)

    def member(self, name: str) -> "Site | None":
        """Return the place of a property's value, None when nothing is checked there or below."""
        known: str | None = name if any(name in self.map.properties(p) for p in self.pointers) else None
        if known not in self._names:
            found = (self.map.member_pointer(pointer, name) for pointer in self.pointers)
            self._names[known] = self.map.site(found)
        return self._names[known]

    def element(self, index: int) -> "Site | None":
        """Return the place of an array's element, None when nothing is checked there or below."""
        index = min(index, self.map.num_places)
        if index not in self._places:
            found = (self.map.element_pointer(pointer, index) for pointer in self.pointers)
            self._places[index] = self.map.site(found)
        return self._places[index]


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
        self._sites: dict[frozenset[str], Site | None] = {}
        self._reachable: dict[str, frozenset[str]] = {}
        self.num_places = 0
        root = self.site([""])
        every = tuple(dict.fromkeys(keyword for names in residual.values() for keyword in names))
        # The whole document is checked in any case.
        inner = tuple(check for check in root.checks if check.pointer) if root else ()
        checks = (Check("", every), *inner)
        pointers = root.pointers if root else frozenset([""])
        self.root = Site(self, pointers, checks, root.has_children if root else False)

    def site(self, pointers: Any) -> Site | None:
        """Return the place to which all these schemas apply."""
        key = frozenset(p for start in pointers if start is not None for p in self._expand(start))
        if key not in self._sites:
            checks = tuple(check for p in sorted(key) if (check := self._make_check(p)) is not None)
            has_children = any(self._reach(child) for p in key for child in self._sure_children(p))
            self._sites[key] = Site(self, key, checks, has_children) if checks or has_children else None
        return self._sites[key]

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
        keyword, rest = self._item_keywords(schema)
        places = schema.get(keyword)
        if isinstance(places, list) and index < len(places):
            return join_pointer(pointer, keyword, index)
        return join_pointer(pointer, rest) if rest in schema else None

    def _find(self, pointer: str) -> dict[str, Any]:
        found = find_at(self._document, pointer)
        if not isinstance(found, dict):
            return {}
        if self._is_ref_alone and isinstance(found.get("$ref"), str):
            return {"$ref": found["$ref"]}
        return found

    @staticmethod
    def _item_keywords(schema: dict[str, Any]) -> tuple[str, str]:
        """Return the keyword for elements by place and the one for the rest; older drafts name them otherwise."""
        return ("items", "additionalItems") if isinstance(schema.get("items"), list) else ("prefixItems", "items")

    def _expand(self, start: str) -> Iterator[str]:
        """Yield a schema and what it demands of the same value without condition."""
        seen: set[str] = set()
        pending = [start]
        while pending:
            pointer = pending.pop()
            if pointer in seen:
                continue
            seen.add(pointer)
            yield pointer
            schema = self._find(pointer)
            branches = schema.get("allOf")
            if isinstance(branches, list):
                pending.extend(join_pointer(pointer, "allOf", index) for index in range(len(branches)))
            pending.extend(self._targets(schema))

    @staticmethod
    def _targets(schema: dict[str, Any]) -> Iterator[str]:
        ref = schema.get("$ref")
        if isinstance(ref, str) and (ref == "#" or ref.startswith("#/")):
            yield "".join(join_pointer("", part) for part in split_pointer(unquote(ref[1:])))

    def _sure_children(self, pointer: str) -> Iterator[str]:
        schema = self._find(pointer)
        yield from (join_pointer(pointer, "properties", name) for name in self.properties(pointer))
        if "additionalProperties" in schema and "patternProperties" not in schema:
            yield join_pointer(pointer, "additionalProperties")
        keyword, rest = self._item_keywords(schema)
        places = schema.get(keyword)
        if isinstance(places, list):
            self.num_places = max(self.num_places, len(places))
            yield from (join_pointer(pointer, keyword, index) for index in range(len(places)))
        if rest in schema:
            yield join_pointer(pointer, rest)

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

    def _reach(self, start: str) -> frozenset[str]:
        """Return the residual keywords in a schema and everything below it, references followed."""
        if start not in self._reachable:
            found: set[str] = set()
            seen: set[str] = set()
            pending = [start]
            while pending:
                pointer = pending.pop()
                if pointer in seen:
                    continue
                seen.add(pointer)
                found.update(self._residual.get(pointer, ()))
                schema = self._find(pointer)
                pending.extend(self._targets(schema))
                pending.extend(
                    join_pointer(pointer, *path)
                    for path, _ in iterate_children(schema)
                    if path[0] not in ("$defs", "definitions")
                )
            self._reachable[start] = frozenset(found)
        return self._reachable[start]
