"""Errors of fields in JSON's terms, where pydantic speaks of dictionaries and instances."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Path = tuple[str | int, ...]  # a place in a request, such as ("messages", 3, "content")

MAX_VALUE_CHARS = 80

# pydantic's error against a value of another kind -> the kind that is wanted
KINDS = {
    "bool_type": "true or false", "dict_type": "an object", "float_type": "a number",
    "int_type": "an integer", "list_type": "a list", "model_attributes_type": "an object",
    "model_type": "an object", "string_type": "a text",
}
RULES = {
    "bool_parsing": "must be true or false", "finite_number": "must be a finite number",
    "float_parsing": "must be a number",
    "int_from_float": "must be an integer", "int_parsing": "must be an integer",
    "int_parsing_size": "must be an integer of fewer digits", "literal_error": "must be {expected}",
    "string_pattern_mismatch": "must match {pattern}", "string_unicode": "must be valid Unicode",
    **{name: f"must be {kind}" for name, kind in KINDS.items()},
}
# -> the word before the bound, and the bound's name
BOUNDS = {
    "greater_than": ("greater than", "gt"), "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"), "less_than_equal": ("at most", "le"),
}
# -> the same for a size, and the unit that is counted
SIZES = {
    "string_too_long": ("at most", "max_length", "character"),
    "string_too_short": ("at least", "min_length", "character"),
    "too_long": ("at most", "max_length", "item"),
    "too_short": ("at least", "min_length", "item"),
}


def say_rule(error: Any) -> str | None:
    """The rule that a value has broken, "must be at most 1"; None for an error of an unknown type.

    Args:
        error: one of `ValidationError.errors()`.
    """
    kind, bounds = error["type"], error.get("ctx", {})
    if kind in BOUNDS:
        word, name = BOUNDS[kind]
        number = bounds[name]
        return f"must be {word} {int(number) if number == int(number) else number}"
    if kind in SIZES:
        word, name, noun = SIZES[kind]
        return f"must have {word} {bounds[name]} {noun}{'' if bounds[name] == 1 else 's'}"
    return RULES[kind].format_map(bounds) if kind in RULES else None


def say_place(parts: Sequence[str | int]) -> str:
    """Return the place in a request: stop[0], stream_options.include_usage."""
    steps = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return "".join(steps).removeprefix(".")


def say_value(value: object) -> str:
    """A value as its client may know it again; of a long one the beginning, of a list or an object the size."""
    # repr of a huge list costs more than the check that refused it
    if isinstance(value, list | dict):
        return f"({type(value).__name__} of {len(value)})"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value[:MAX_VALUE_CHARS]) if isinstance(value, str) else repr(value)
    return text if len(text) <= MAX_VALUE_CHARS else text[:MAX_VALUE_CHARS] + "..."
