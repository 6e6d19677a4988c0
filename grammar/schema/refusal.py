"""Turn an engine's complaint about a whole schema into a pointer, a keyword and a reason."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from ..errors import GrammarError, InvalidGrammar, UnsupportedGrammar
from .keywords import ASSERTIONS, iterate_children, join_pointer

Schema = dict[str, Any] | bool

# How llguidance begins when nothing satisfies a schema.
SIGN = "Unsatisfiable schema"
MAX_NUM_PROBES = 200
# Characters of all schemas that are probed for one complaint, about a tenth of a second.
MAX_NUM_PROBED = 1024 * 1024

# What a message contains -> the keywords it may be about, and a better wording where there is one.
_SIGNS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    (
        "oneOf constraints",
        ("oneOf",),
        "its branches cannot be shown to exclude each other; use anyOf where several may match",
    ),
    (
        "min/maxProperties",
        ("minProperties", "maxProperties"),
        "the number of properties is enforced only when all listed ones are required",
    ),
    ("patternProperty", ("patternProperties",), ""),
    ("look-around", ("pattern", "patternProperties"), "look-ahead and look-behind are not supported"),
    (
        "regex",
        (
            "pattern",
            "patternProperties",
            "minimum",
            "maximum",
            "exclusiveMinimum",
            "exclusiveMaximum",
            "multipleOf",
        ),
        "",
    ),
    ("not present in a registry", ("$ref",), "only references within the schema are followed"),
    ("Pointer", ("$ref",), ""),
    ("ircular", ("$ref",), ""),
    ("multipleOf", ("multipleOf",), ""),
    ("intersection", ("allOf", "$ref", "anyOf", "oneOf"), ""),
)
# What contradicts itself or something beside it, where the message does not name it.
_CONTRADICTING = (
    *("allOf", "$ref", "anyOf", "oneOf", "enum", "const", "pattern", "format", "required", "minProperties"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "prefixItems", "items"),
)


def explain_refusal(schema: Schema, message: str, probe: Callable[[Schema], str]) -> GrammarError:
    """Return the error to raise for a schema that an engine refused with `message`.

    Args:
        probe: compiles another schema and returns the engine's complaint, "" for none.
    """
    summary = summarise(message)
    if message.startswith(SIGN):
        return explain_contradiction(schema, message, probe)
    for sign, keywords, wording in _SIGNS:
        if sign in message:
            place = locate(schema, keywords, message, probe)
            if place is not None:
                return UnsupportedGrammar(*place, wording or summary)
    quoted = set(re.findall(r"[\"'`](\$?\w+)[\"'`]", message))
    place = locate(schema, tuple(quoted), message, probe)
    return UnsupportedGrammar(*(place or ("", "schema")), summary)


def explain_contradiction(schema: Schema, message: str, probe: Callable[[Schema], str]) -> InvalidGrammar:
    """Return the error for a schema that nothing satisfies."""
    named = [word for word in re.findall(r"\w+", message) if word in ASSERTIONS]
    place = locate(schema, (*named, *_CONTRADICTING), message, probe, is_exact=True)
    where = f"{place[1]!r} at {place[0] or '#'}: " if place else ""
    return InvalidGrammar(
        f"no text satisfies the schema: {where}{summarise(message)}", place[0] if place else None
    )


def summarise(message: str) -> str:
    """Return the telling line of an engine's message."""
    lines = message.strip().split("\n")
    line = lines[-1].removeprefix("error:") if "parse error" in message else lines[0]
    return line.removeprefix(f"{SIGN}:").strip()[:300]


def locate(
    schema: Schema,
    keywords: tuple[str, ...],
    message: str,
    probe: Callable[[Schema], str],
    is_exact: bool = False,
) -> tuple[str, str] | None:
    """Return (pointer, keyword) of the innermost candidate that alone draws the same complaint.

    Without one, unless it has to be exact, the first that has any of the keywords: a complaint can depend on where
    a schema is used.
    """
    shared: dict[str, Any] = {}
    if isinstance(schema, dict):
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    size_shared = len(json.dumps(shared))
    first, num_left = None, MAX_NUM_PROBED
    for number, (pointer, candidate) in enumerate(iterate_inside_out(schema)):
        keyword = next((name for name in keywords if name in candidate), None)
        if keyword is None:
            continue
        first = first or (pointer, keyword)
        if number >= MAX_NUM_PROBES or num_left <= 0:
            continue
        text = json.dumps(candidate)
        is_alone = '"$ref"' not in text
        num_left -= len(text) + (0 if is_alone else size_shared)
        if probe(candidate if is_alone else {**shared, **candidate}) == message:
            return pointer, keyword
    return None if is_exact else first


def iterate_inside_out(schema: Schema, pointer: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (pointer, schema) for all schema objects, subschemas before what holds them."""
    if not isinstance(schema, dict):
        return
    for path, child in iterate_children(schema):
        yield from iterate_inside_out(child, join_pointer(pointer, *path))
    yield pointer, schema
