"""Which strings of an instance can decide a residual check, so that the verdict on all others is the same.

Below a residual keyword every assertion counts: `const` and `enum` tell a few strings from all others, a pattern or
a length may tell any two strings apart. Outside, the engine has already seen to what stands in the schema.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from .keywords import iterate_children, join_pointer
from .references import find_targets, has_foreign_references

Find = Callable[[str], dict[str, Any]]
# (pointer of a schema, keyword in it) of an assertion that counts.
Item = tuple[str, str]

_IN_PLACE = frozenset(
    ["allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependencies", "dependentSchemas"]
)
_ANY_STRING = frozenset(["pattern", "format", "minLength", "maxLength"])
_VALUES = frozenset(["const", "enum"])
_UNEVALUATED = frozenset(["unevaluatedItems", "unevaluatedProperties"])
_MEMBERS = frozenset(["properties", "patternProperties", "additionalProperties", "unevaluatedProperties"])
_ELEMENTS = frozenset(["items", "prefixItems", "additionalItems", "contains", "unevaluatedItems"])


@dataclass(frozen=True, slots=True)
class Telling:
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


# Nothing counts: no check looks at the strings there.
NOTHING = Telling()
# Anything may count.
ANYTHING = Telling(strings=None, is_whole=True)


class TellingMap:
    """Finds what counts at the places of one document.

    Args:
        find: pointer -> schema object, {} for what asserts nothing.
    """

    def __init__(self, document: Any, find: Find) -> None:
        self._find = find
        self._is_opaque = not isinstance(document, dict) or not document or has_foreign_references(document)

    def gather(self, start: Telling, items: Iterable[Item]) -> Telling:
        """Return what counts at a place: what comes from above and the assertions found there."""
        if self._is_opaque:
            return ANYTHING
        strings: set[str] = set()
        is_any, is_whole, is_unique = start.is_whole, start.is_whole, False
        seen: set[Item] = set()
        pending = [*start.items, *items]
        while pending:
            item = pending.pop()
            if item in seen:
                continue
            seen.add(item)
            pointer, keyword = item
            schema = self._find(pointer)
            is_any |= keyword in _ANY_STRING
            is_unique |= keyword == "uniqueItems"
            if keyword in _VALUES:
                values = schema["enum"] if keyword == "enum" else [schema["const"]]
                strings.update(value for value in values if isinstance(value, str))
                is_whole |= any(isinstance(value, dict | list) for value in values)
            pending.extend(self._expand(schema, pointer, keyword))
        told = None if is_any else frozenset(strings)
        return Telling(frozenset(seen), told, is_whole, is_unique, start.is_compared)

    def member(self, telling: Telling, name: str) -> Telling:
        """Return what comes from a place to one of its properties."""
        return self._descend(
            telling, _MEMBERS, lambda schema, path: path[0] != "properties" or path[1] == name
        )

    def element(self, telling: Telling) -> Telling:
        """Return what comes from a place to any of its elements."""
        found = self._descend(telling, _ELEMENTS, lambda schema, path: True)
        return replace(found, is_compared=True) if telling.is_unique else found

    def list_items(self, pointer: str) -> Iterator[Item]:
        """Yield all assertions of a schema."""
        yield from ((pointer, keyword) for keyword in self._find(pointer))

    def _expand(self, schema: dict[str, Any], pointer: str, keyword: str) -> Iterator[Item]:
        """Yield the assertions that a keyword brings to the same value."""
        if keyword == "$ref":
            for target in find_targets(schema):
                yield from self.list_items(target)
        elif keyword in _UNEVALUATED:
            # Which branches hold decides what is evaluated.
            yield from (
                (pointer, other) for other in schema if other in _IN_PLACE or other in ("$ref", "contains")
            )
        elif keyword in _IN_PLACE:
            for path, _ in iterate_children({keyword: schema[keyword]}):
                yield from self.list_items(join_pointer(pointer, *path))
            if keyword == "if":
                yield from ((pointer, other) for other in ("then", "else") if other in schema)

    def _descend(
        self,
        telling: Telling,
        keywords: frozenset[str],
        is_meant: Callable[[dict[str, Any], tuple[str | int, ...]], bool],
    ) -> Telling:
        if telling.is_whole or telling.is_compared:
            return ANYTHING
        items: set[Item] = set()
        for pointer, keyword in telling.items:
            if keyword not in keywords:
                continue
            schema = self._find(pointer)
            for path, _ in iterate_children({keyword: schema[keyword]}):
                if is_meant(schema, path):
                    items.update(self.list_items(join_pointer(pointer, *path)))
        return Telling(frozenset(items)) if items else NOTHING
