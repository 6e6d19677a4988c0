"""Where in an instance strings have to be quotations: the schemas with `"x-grounded": true`.

The annotation counts where it surely applies: at the root, through properties, additionalProperties, items, allOf
and $ref, and in a branch of anyOf or oneOf that is the only one to take a string (or the object or array around
it). Where it would apply only under another condition it is refused.
"""

import itertools
from collections.abc import Iterator
from typing import Any, Literal

from ..errors import UnsupportedGrammar
from ..match.source_text import Lengths
from .dialect import detect_dialect, is_dialect_named
from .keywords import ASSERTIONS, TYPES_OF_KEYWORD, iterate_children, join_pointer, list_properties
from .references import find_demands, find_targets, is_local, item_keywords, walk
from .rules import allowed_types, types_of
from .weaken import find_at

KEYWORD = "x-grounded"
Kind = Literal["string", "object", "array"]
KINDS: tuple[Kind, ...] = ("string", "object", "array")

MAX_NUM_PLACES = 5_000
_CONDITION = "it would apply only under a condition; it can stand below properties, items, allOf and $ref"
# What else may be said about a grounded string: anything more could leave no quotation that fits.
_BESIDE = frozenset(["type", "minLength", "maxLength", "$ref", "allOf", "anyOf", "oneOf"])
_SHARED = frozenset(["$defs", "definitions"])


class GroundedSite:
    """A place in an instance: the schemas that surely apply there.

    Attributes:
        lengths: how long the quotation may be, None where strings are free.
        has_children: strings below have to be quotations too.
        names: property names are free.
    """

    names: None = None

    def __init__(self, map: "GroundingMap", starts: frozenset[str]) -> None:
        self._map = map
        self.starts = starts
        self.lengths = map.find_lengths(starts)
        self.checks: tuple[Any, ...] = () if self.lengths is None else (self,)
        self.has_children = any(map.reaches(child) is not None for child in map.list_children(starts))
        self._names: dict[str | None, GroundedSite | None] = {}
        self._places: dict[int, GroundedSite | None] = {}

    def member(self, name: str) -> "GroundedSite | None":
        """Return the place of a property's value, None when strings are free there and below."""
        known = name if name in self._map.list_names(self.starts) else None
        if known not in self._names:
            self._names[known] = self._map.site(self._map.find_members(self.starts, name))
        return self._names[known]

    def element(self, index: int) -> "GroundedSite | None":
        """Return the place of an array's element, None when strings are free there and below."""
        index = min(index, self._map.num_places)
        if index not in self._places:
            self._places[index] = self._map.site(self._map.find_elements(self.starts, index))
        return self._places[index]


class GroundingMap:
    """The places of one document that has the annotation.

    Raises:
        UnsupportedGrammar: the annotation stands where it cannot be enforced, or beside what cannot be met too.
    """

    def __init__(self, document: Any) -> None:
        self._document = document
        dialect = detect_dialect(document)
        self._is_ref_alone = dialect.ignores_ref_siblings and is_dialect_named(document)
        self._sites: dict[frozenset[str], GroundedSite | None] = {}
        self._reached: dict[str, str | None] = {}
        self._seen: set[frozenset[str]] = set()
        self.num_places = 0
        self.pointers = frozenset(p for p in self._walk("", is_shared_seen=True) if self._is_grounded(p))
        self._check_references()
        self._check_places()
        self.root = self.site([""])

    def site(self, starts: Any) -> GroundedSite | None:
        """Return the place to which all these schemas apply."""
        key = frozenset(starts)
        if key not in self._sites:
            site = GroundedSite(self, key)
            self._sites[key] = site if site.checks or site.has_children else None
        return self._sites[key]

    def find_lengths(self, starts: frozenset[str]) -> Lengths | None:
        """Return how long a quotation at a place may be, None where strings are free."""
        schemas = {pointer: self.find(pointer) for pointer in self._expand(starts, "string")}
        if not any(schema.get(KEYWORD) is True for schema in schemas.values()):
            return None
        for pointer, schema in schemas.items():
            for keyword in schema:
                if keyword in ASSERTIONS - _BESIDE and "string" in TYPES_OF_KEYWORD.get(keyword, KINDS):
                    raise UnsupportedGrammar(pointer, keyword, f"it may leave no quotation for {KEYWORD}")
        least = max(int(schema.get("minLength", 0)) for schema in schemas.values())
        most = [int(schema["maxLength"]) for schema in schemas.values() if "maxLength" in schema]
        return Lengths(least, min(most, default=None))

    def list_lengths(self) -> list[tuple[str, Lengths]]:
        """Return (pointer of a schema, lengths) of each place with grounded strings."""
        return [
            (min(starts), lengths)
            for starts in self._seen
            if (lengths := self.find_lengths(starts)) is not None
        ]

    def list_names(self, starts: frozenset[str]) -> set[str]:
        """Return the property names that schemas at a place list."""
        return {
            name for pointer in self._expand(starts, "object") for name in list_properties(self.find(pointer))
        }

    def find_members(self, starts: frozenset[str], name: str) -> Iterator[str]:
        """Yield the schemas that surely apply to a property."""
        for pointer in self._expand(starts, "object"):
            schema = self.find(pointer)
            if name in list_properties(schema):
                yield join_pointer(pointer, "properties", name)
            elif "additionalProperties" in schema and "patternProperties" not in schema:
                yield join_pointer(pointer, "additionalProperties")

    def find_elements(self, starts: frozenset[str], index: int) -> Iterator[str]:
        """Yield the schemas that surely apply to an element."""
        for pointer in self._expand(starts, "array"):
            schema = self.find(pointer)
            keyword, rest = item_keywords(schema)
            places = schema.get(keyword)
            self.num_places = max(self.num_places, len(places) if isinstance(places, list) else 0)
            if isinstance(places, list) and index < len(places):
                yield join_pointer(pointer, keyword, index)
            elif rest in schema:
                yield join_pointer(pointer, rest)

    def list_children(self, starts: frozenset[str]) -> set[str]:
        """Return the schemas that surely apply to some member or element of a place."""
        found: set[str] = set()
        for name in [*self.list_names(starts), None]:
            # No property is called so; what is found then is for the names not listed.
            found.update(self.find_members(starts, "\udfff" if name is None else name))
        found.update(self.find_elements(starts, 0))
        for index in range(1, self.num_places + 1):
            found.update(self.find_elements(starts, index))
        return found

    def reaches(self, start: str) -> str | None:
        """Return an annotated schema in or below a schema, references followed."""
        if start not in self._reached:
            self._reached[start] = next((p for p in self._walk(start) if self._is_grounded(p)), None)
        return self._reached[start]

    def find(self, pointer: str) -> dict[str, Any]:
        """Return a schema object; {} for what asserts nothing."""
        found = find_at(self._document, pointer)
        if not isinstance(found, dict):
            return {}
        if self._is_ref_alone and isinstance(found.get("$ref"), str):
            return {keyword: found[keyword] for keyword in ("$ref", KEYWORD) if keyword in found}
        return found

    def _is_grounded(self, pointer: str) -> bool:
        return self.find(pointer).get(KEYWORD) is True

    def _walk(self, start: str, is_shared_seen: bool = False) -> Iterator[str]:
        """Return a schema and everything below it, references followed."""

        def follow(pointer: str) -> Iterator[str]:
            schema = self.find(pointer)
            yield from find_targets(schema)
            for path, _ in iterate_children(schema):
                if is_shared_seen or path[0] not in _SHARED:
                    yield join_pointer(pointer, *path)

        return walk([start], follow)

    def _check_references(self) -> None:
        """Refuse references that are not followed here: what they lead to may have the annotation."""
        for pointer in self._walk("", is_shared_seen=True):
            schema = self.find(pointer)
            ref = schema.get("$ref", "#")
            foreign: list[str] = [
                keyword for keyword in ("$dynamicRef", "$recursiveRef") if keyword in schema
            ]
            if isinstance(ref, str) and not is_local(ref):
                foreign.append("$ref")
            if pointer:
                foreign.extend(keyword for keyword in ("$id", "id") if isinstance(schema.get(keyword), str))
            for keyword in foreign:
                reason = f"beside {KEYWORD} only references by JSON pointer within one document are followed"
                raise UnsupportedGrammar(pointer, keyword, reason)

    def _check_places(self) -> None:
        """Go through all places and refuse an annotation under a condition."""
        pending = [frozenset([""])]
        while pending:
            starts = pending.pop()
            if starts in self._seen or not any(self.reaches(start) is not None for start in starts):
                continue
            self._seen.add(starts)
            if len(self._seen) > MAX_NUM_PLACES:
                raise UnsupportedGrammar("", KEYWORD, f"the schema has more than {MAX_NUM_PLACES} places")
            self._check_conditions(starts)
            self.find_lengths(starts)
            names = [*self.list_names(starts), "\udfff"]
            pending.extend(frozenset(self.find_members(starts, name)) for name in names)
            # Looking at one element finds out how many have a place of their own.
            pending.append(frozenset(self.find_elements(starts, 0)))
            pending.extend(frozenset(self.find_elements(starts, i)) for i in range(1, self.num_places + 1))

    def _check_conditions(self, starts: frozenset[str]) -> None:
        sure = {kind: set(self._expand(starts, kind)) for kind in KINDS}
        followed = set().union(*sure.values()) | self.list_children(starts)
        for pointer in set().union(*sure.values()):
            schema = self.find(pointer)
            for path, _ in iterate_children(schema):
                child = join_pointer(pointer, *path)
                if (
                    path[0] not in _SHARED
                    and child not in followed
                    and (found := self.reaches(child)) is not None
                ):
                    raise UnsupportedGrammar(found, KEYWORD, _CONDITION)
        for kind in KINDS:
            for pointer, keyword in itertools.product(sure[kind], ("anyOf", "oneOf")):
                fitting = self._fitting_branches(self.find(pointer), pointer, keyword, kind)
                found = next((end for branch in fitting if (end := self.reaches(branch)) is not None), None)
                if len(fitting) > 1 and found is not None:
                    raise UnsupportedGrammar(found, KEYWORD, _CONDITION)

    def _expand(self, starts: frozenset[str], kind: Kind) -> Iterator[str]:
        """Return the schemas that surely apply to a value of a kind."""

        def follow(pointer: str) -> Iterator[str]:
            schema = self.find(pointer)
            yield from find_demands(schema, pointer)
            for keyword in ("anyOf", "oneOf"):
                fitting = self._fitting_branches(schema, pointer, keyword, kind)
                if len(fitting) == 1:
                    yield from fitting

        return walk(starts, follow)

    def _fitting_branches(self, schema: dict[str, Any], pointer: str, keyword: str, kind: Kind) -> list[str]:
        branches = schema.get(keyword)
        if not isinstance(branches, list):
            return []
        pointers = (join_pointer(pointer, keyword, index) for index in range(len(branches)))
        return [branch for branch in pointers if self._takes(branch, kind, frozenset())]

    def _takes(self, pointer: str, kind: Kind, seen: frozenset[str]) -> bool:
        """Tell whether a schema may take a value of a kind."""
        if pointer in seen:
            return True
        seen |= {pointer}
        if find_at(self._document, pointer) is False:
            return False
        schema = self.find(pointer)
        types = allowed_types(schema)
        if types is not None and kind not in types:
            return False
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list) and not any(kind in types_of(value) for value in values):
            return False
        branches = schema.get("allOf")
        every = [
            join_pointer(pointer, "allOf", i)
            for i in range(len(branches) if isinstance(branches, list) else 0)
        ]
        return all(self._takes(each, kind, seen) for each in (*every, *find_targets(schema)))
