"""JSON pointers: the steps of one, and what references within a schema lead to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import unquote


def escape_pointer(name: str) -> str:
    """A property name as a step of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def split_pointer(pointer: str) -> list[str]:
    """The steps of a JSON pointer."""
    return [step.replace("~1", "/").replace("~0", "~") for step in pointer.split("/")[1:]]


def read_reference(reference: Any) -> str | None:
    """The JSON pointer that a `$ref` is, None for any other."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    return "".join(f"/{escape_pointer(step)}" for step in split_pointer(unquote(reference[1:])))


def follow(document: Any, pointer: str) -> Any:
    """Return the value at a JSON pointer, None if there is none."""
    place = document
    for step in split_pointer(pointer):
        if isinstance(place, list):
            place = place[int(step)] if step.isdecimal() and int(step) < len(place) else None
        else:
            place = place.get(step) if isinstance(place, dict) else None
    return place


def list_references(values: Iterable[Any]) -> list[Any]:
    """The references anywhere in some values."""
    return [node["$ref"] for value in values for node in walk_objects(value) if "$ref" in node]


def walk_objects(value: Any) -> Iterator[dict[str, Any]]:
    """Every object in a value, itself included."""
    waiting = [value]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            yield node
        waiting += node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
