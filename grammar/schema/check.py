"""What a finished value is checked against, and which schemas the names of an object decide."""

from dataclasses import dataclass
from typing import Any

from .keywords import ASSERTIONS, iterate_children

ABOUT_NAMES = frozenset(
    [
        *("not", "allOf", "anyOf", "oneOf", "type", "propertyNames", "required", "dependentRequired"),
        *("minProperties", "maxProperties"),
    ]
)


@dataclass(frozen=True, slots=True)
class Check:
    """A schema that a finished value has to satisfy.

    Attributes:
        pointer: where the user wrote it.
        keywords: the residual keywords in it, for messages.
        is_distinct: not the schema, but that the value is none of those before it in the array.
        is_alone: what is checked is a name, as the only property of an object.
    """

    pointer: str
    keywords: tuple[str, ...]
    is_distinct: bool = False
    is_alone: bool = False


def is_about_names(schema: Any) -> bool:
    """Tell whether only the names of an object decide on it."""
    if not isinstance(schema, dict):
        return isinstance(schema, bool)
    keywords = schema.keys() & ASSERTIONS
    if not keywords <= ABOUT_NAMES or schema.get("type", "object") != "object":
        return False
    children = (
        child for path, child in iterate_children(schema) if path[0] in ("not", "allOf", "anyOf", "oneOf")
    )
    return all(map(is_about_names, children))
