"""Maps an engine's error about a whole schema to a node, a keyword and a reason."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from .emit import Emitter, Json
from .keywords import ASSERTIONS
from .node import Node, Schema, iterate_nodes

# Prefix of llguidance's message if nothing satisfies a schema.
SIGN = "Unsatisfiable schema"
MAX_NUM_PROBES = 200
# Characters of all schemas compiled to locate one error, about a tenth of a second.
MAX_NUM_PROBED = 1024 * 1024

_NUMERIC = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
# Part of a message -> the keywords it may concern, and a clearer message if there is one.
_SIGNS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    (
        "oneOf constraints", ("oneOf",),
        "its branches cannot be shown to exclude each other; use anyOf where several may match",
    ),
    (
        "min/maxProperties", ("minProperties", "maxProperties"),
        "the number of properties is enforced only when all listed ones are required",
    ),
    ("patternProperty", ("patternProperties",), ""),
    ("look-around", ("pattern", "patternProperties"), "look-ahead and look-behind are not supported"),
    ("regex", ("pattern", "patternProperties", *_NUMERIC), ""),
    ("ircular", ("$ref",), ""),
    ("multipleOf", ("multipleOf",), ""),
    ("intersection", ("allOf", "$ref", "anyOf", "oneOf"), ""),
)
# Keywords that may contradict themselves or a neighbour, if the message names none.
_CONTRADICTING = (
    *("allOf", "$ref", "anyOf", "oneOf", "enum", "const", "pattern", "format", "required", "minProperties"),
    *(*_NUMERIC, "prefixItems", "items"),
)


@dataclass(eq=False)
class Refusal(Exception):
    """A keyword that an engine refused or that rules cannot express, with its node if that is known."""

    node: Node | None
    keyword: str
    reason: str
    is_contradiction: bool = False


def locate(root: Schema, make_emitter: Callable[[], Emitter], probe: Callable[[Json], str], message: str) -> Refusal:
    """Return the node and keyword that an error about a whole document concerns.

    It is the innermost node that alone draws the same complaint. Without one, unless the message is that nothing
    satisfies the schema, it is the first with such a keyword: a complaint can depend on where a schema is used.

    Args:
        make_emitter: makes what writes one document as the engine reads it.
        probe: compiles another schema and returns the engine's complaint, "" for none.
    """
    is_contradiction, summary = message.startswith(SIGN), summarise(message)
    if is_contradiction:
        named = [word for word in re.findall(r"\w+", message) if word in ASSERTIONS]
        attempts = [((*named, *_CONTRADICTING), "")]
    else:
        quoted = tuple(re.findall(r"[\"'`](\$?\w+)[\"'`]", message))
        attempts = [*((keywords, text) for sign, keywords, text in _SIGNS if sign in message), (quoted, "")]
    # A node comes before the nodes below it.
    nodes = list(iterate_nodes([root]))[::-1]
    for keywords, wording in attempts:
        first, num_probes, num_left = None, MAX_NUM_PROBES, MAX_NUM_PROBED
        for node in nodes if keywords else ():
            emitter = make_emitter()
            keyword = next((name for name in keywords if name in emitter.list_keywords(node)), None)
            if keyword is None:
                continue
            first = first or Refusal(node, keyword, wording or summary, is_contradiction)
            if num_probes == 0 or num_left <= 0:
                break
            written = emitter.write(node)
            num_probes, num_left = num_probes - 1, num_left - len(json.dumps(written))
            if probe(as_object(written)) == message:
                return replace(first, node=node, keyword=keyword)
        if first is not None and not is_contradiction:
            return first
    return Refusal(None, "schema", summary, is_contradiction)


def summarise(message: str) -> str:
    """Return the line of an engine's message that gives the reason."""
    lines = message.strip().split("\n")
    line = lines[-1].removeprefix("error:") if "parse error" in message else lines[0]
    return line.removeprefix(f"{SIGN}:").strip()[:300]


def as_object(schema: Any) -> Json:
    """Return a document as an object, because an engine expects options beside keywords."""
    return {"enum": []} if schema is False else {} if schema is True else schema
