"""Loosen a normalised schema: leave out what no engine enforces, so that a residual check can enforce it.

Only assertions are dropped, and only where schemas add up (never inside `not` or `if`, which are dropped as a
whole), so the loosened schema accepts every valid instance. `oneOf` stays while the engine can show that its
branches exclude each other, and becomes `anyOf` where it cannot.
"""

import copy
from dataclasses import dataclass, field
from typing import Any

from .guides import find_guides
from .keywords import iterate_children, join_pointer, split_pointer
from .node import Node
from .one_of import find_guides as find_one_of_guides
from .one_of import narrow_branches
from .problems import find_problems
from .references import find_targets

# These decide what the other keywords mean; without them nothing would guide the text.
NOT_CHECKED = frozenset(["$ref", "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "x-grounded"])
# Keywords that mean nothing, or something else, without the first one.
_COMPANIONS: dict[str, tuple[str, ...]] = {
    "if": ("then", "else"),
    "contains": ("minContains", "maxContains"),
    # What no pattern matches any more would be additional.
    "patternProperties": ("additionalProperties",),
}
# What an engine may refuse and a validator can check.
_DROPPABLE = frozenset(
    [
        *("minProperties", "maxProperties", "patternProperties", "pattern", "format", "multipleOf"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    ]
)


@dataclass(slots=True)
class Loosening:
    """A schema on its way to what an engine takes.

    Attributes:
        schema: the schema in its present form.
        dropped: (pointer into the normalised schema, keyword) of what it no longer says.
        is_guided: what is dropped leaves a guide behind, where there is one.
        written: the schema before anything was dropped.
    """

    schema: dict[str, Any]
    dropped: list[tuple[str, str]] = field(default_factory=list)
    is_guided: bool = False
    written: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.written = self.schema

    def drop_problems(self) -> None:
        """Drop every keyword that llguidance is known not to take or not to read exactly."""
        self.schema = copy.deepcopy(self.schema)
        visited: set[str] = set()
        pending = [("", self.schema)]
        while pending:
            pointer, schema = pending.pop()
            if pointer in visited or not isinstance(schema, dict):
                continue
            visited.add(pointer)
            for problem in list(find_problems(Node(schema, pointer))):
                # A `minProperties` that repeated names could make up still guides; it is only not enough.
                if problem.keyword not in NOT_CHECKED | {"minProperties"}:
                    self._drop(schema, pointer, problem.keyword)
            pending.extend((join_pointer(pointer, *path), child) for path, child in iterate_children(schema))
            pending.extend((target, find_at(self.schema, target)) for target in find_targets(schema))

    def drop_refused(self, pointer: str, keyword: str, reason: str) -> bool:
        """Drop a keyword that an engine refused; False when it cannot be dropped."""
        schema = find_at(self.schema, pointer)
        if not isinstance(schema, dict) or keyword not in schema:
            return False
        if keyword == "oneOf":
            self._turn_into_any_of(schema, pointer)
            return True
        # A schema that refers to itself cannot be met with another; the others still guide.
        is_circular = keyword == "$ref" and "ircular" in reason
        if keyword not in _DROPPABLE and not is_circular:
            return False
        self._drop(schema, pointer, keyword)
        return True

    def _drop(self, schema: dict[str, Any], pointer: str, keyword: str) -> None:
        guides = find_guides(schema, keyword) if self.is_guided and keyword in schema else []
        for name in (keyword, *_COMPANIONS.get(keyword, ())):
            if schema.pop(name, None) is not None:
                self.dropped.append((pointer, name))
        self._add_guides(schema, guides)

    def _add_guides(self, schema: dict[str, Any], guides: list[dict[str, Any]]) -> None:
        for guide in guides:
            # What a guide says may itself be more than an engine takes; that is no loss.
            loosened = Loosening(guide)
            loosened.drop_problems()
            if loosened.schema:
                schema["allOf"] = [*schema.get("allOf", []), loosened.schema]

    def _turn_into_any_of(self, schema: dict[str, Any], pointer: str) -> None:
        guides: list[dict[str, Any]] = []
        branches = schema.pop("oneOf")
        # Branches from which something was dropped take more than they should, so others would be left too little.
        written = find_at(self.written, pointer)
        if self.is_guided and isinstance(written, dict) and "oneOf" in written:
            guides, branches = find_one_of_guides(written), narrow_branches(written, branches)
        if "anyOf" in schema:
            schema["allOf"] = [*schema.get("allOf", []), {"anyOf": branches}]
        else:
            schema["anyOf"] = branches
        self.dropped.append((pointer, "oneOf"))
        self._add_guides(schema, guides)


def find_at(schema: Any, pointer: str) -> Any:
    """Follow a JSON pointer; None where it leads nowhere."""
    for part in split_pointer(pointer):
        if isinstance(schema, list) and part.isdecimal() and int(part) < len(schema):
            schema = schema[int(part)]
        elif isinstance(schema, dict):
            schema = schema.get(part)
        else:
            return None
    return schema


def find_written(schema: Any, pointer: str, keyword: str) -> tuple[str, str]:
    """Return (pointer, keyword) in a schema of what is refused in its loosened form, where `oneOf` is an `anyOf`."""
    way: list[str] = []
    rest = [*split_pointer(pointer), keyword]
    while rest:
        part, *rest = rest
        is_moved = part in ("allOf", "anyOf") and find_at(schema, join_pointer("", part, *rest[:1])) is None
        if is_moved and isinstance(schema, dict) and "oneOf" in schema:
            # Beside another `anyOf` it stands in one more branch of `allOf`.
            part, rest = "oneOf", rest[2:] if part == "allOf" else rest
        way.append(part)
        schema = find_at(schema, join_pointer("", part))
    return join_pointer("", *way[:-1]), way[-1]
