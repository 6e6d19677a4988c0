"""References within a document: where they lead, and whether there are others."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any
from urllib.parse import unquote

from .keywords import SCHEMA_MAP_KEYWORDS, join_pointer, split_pointer


def item_keywords(schema: dict[str, Any]) -> tuple[str, str]:
    """Return the keyword for elements by place and the one for the rest; older drafts name them otherwise."""
    return ("items", "additionalItems") if isinstance(schema.get("items"), list) else ("prefixItems", "items")


def is_local(ref: Any) -> bool:
    """Tell whether a `$ref` is a JSON pointer into the document."""
    return isinstance(ref, str) and (ref == "#" or ref.startswith("#/"))


def find_targets(schema: dict[str, Any]) -> Iterator[str]:
    """Yield where a local `$ref` points to."""
    ref = schema.get("$ref")
    if is_local(ref):
        yield "".join(join_pointer("", part) for part in split_pointer(unquote(str(ref)[1:])))


def find_demands(schema: dict[str, Any], pointer: str) -> Iterator[str]:
    """Yield the pointers of what a schema at a pointer demands of the same value: `allOf` branches and references."""
    branches = schema.get("allOf")
    if isinstance(branches, list):
        yield from (join_pointer(pointer, "allOf", index) for index in range(len(branches)))
    yield from find_targets(schema)


def walk(starts: Iterable[str], follow: Callable[[str], Iterable[str]]) -> Iterator[str]:
    """Yield pointers and those that `follow` leads to from each, once, however they refer to each other."""
    seen: set[str] = set()
    pending = list(starts)
    while pending:
        pointer = pending.pop()
        if pointer not in seen:
            seen.add(pointer)
            yield pointer
            pending.extend(follow(pointer))


def map_schemas(value: Any, change: Callable[[dict[str, Any]], Any]) -> Any:
    """Return a document with every object that may be a schema changed, subschemas first; constants stay."""
    if isinstance(value, list):
        return [map_schemas(child, change) for child in value]
    if not isinstance(value, dict):
        return value
    mapped = {}
    for name, child in value.items():
        if name in SCHEMA_MAP_KEYWORDS and isinstance(child, dict):
            mapped[name] = {key: map_schemas(each, change) for key, each in child.items()}
        else:
            mapped[name] = child if name in ("const", "enum") else map_schemas(child, change)
    return change(mapped)


def has_foreign_references(document: Any) -> bool:
    """Tell whether any object, schema or not, has a reference that is no JSON pointer, or an identifier of its own."""
    pending = [document]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            ref = node.get("$ref")
            is_foreign = isinstance(ref, str) and not is_local(ref)
            if is_foreign or "$dynamicRef" in node or "$recursiveRef" in node:
                return True
            is_nested = node is not document
            if is_nested and any(isinstance(node.get(keyword), str) for keyword in ("$id", "id")):
                return True
            pending.extend(node.values())
        elif isinstance(node, list):
            pending.extend(node)
    return False
