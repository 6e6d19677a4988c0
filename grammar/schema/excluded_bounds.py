"""Find number ranges in which llguidance 1.9 lets an excluded bound through.

With `exclusiveMinimum` a whole number and an upper bound less than 1 above it, it accepts the excluded number
itself: 0 for {"exclusiveMinimum": 0, "maximum": 0.5}. Likewise mirrored. All other ranges tried were exact.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ..plan import Problem
from .keywords import ASSERTIONS
from .node import Node

_COMBINING = frozenset(["allOf", "$ref", "anyOf", "oneOf"])
_BOUNDS = frozenset(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
REASON = "next to a bound less than 1 away, the excluded number itself would be let through"


@dataclass(slots=True)
class ExcludedBounds:
    """Collects the bounds of a document: those of different schemas meet where schemas are combined.

    Attributes:
        excluded: (problem, whole number, is it a lower bound) of each exclusive bound.
        above: whole numbers with an upper bound less than 1 above them.
        below: whole numbers with a lower bound less than 1 below them.
        has_conjunction: somewhere several schemas speak about one instance.
    """

    problems: list[Problem] = field(default_factory=list)
    excluded: list[tuple[Problem, int, bool]] = field(default_factory=list)
    above: set[int] = field(default_factory=set)
    below: set[int] = field(default_factory=set)
    has_conjunction: bool = False

    def add(self, node: Node) -> None:
        """Take note of one schema."""
        if not self.has_conjunction and not _COMBINING.isdisjoint(node.schema):
            self.has_conjunction = "allOf" in node.schema or len(node.schema.keys() & ASSERTIONS) > 1
        if _BOUNDS.isdisjoint(node.schema) or node.schema.get("type") == "integer":
            return
        above = {math.floor(v) for v in bounds(node.schema, "maximum", "exclusiveMaximum") if v % 1}
        below = {math.ceil(v) for v in bounds(node.schema, "minimum", "exclusiveMinimum") if v % 1}
        self.above |= above
        self.below |= below
        for keyword, is_lower in (("exclusiveMinimum", True), ("exclusiveMaximum", False)):
            for value in bounds(node.schema, keyword):
                if value % 1:
                    continue
                problem = Problem(node.pointer, node.original_name(keyword), REASON)
                self.excluded.append((problem, int(value), is_lower))
                if value in (above if is_lower else below):
                    self.problems.append(problem)

    def find_problems(self) -> Iterator[Problem]:
        """Yield the bounds that would be let through."""
        yield from self.problems
        if self.has_conjunction:
            for problem, value, is_lower in self.excluded:
                if value in (self.above if is_lower else self.below):
                    yield problem


def bounds(schema: dict[str, Any], *keywords: str) -> Iterator[float]:
    """Yield the numbers of some keywords, where they are present."""
    return (schema[keyword] for keyword in keywords if keyword in schema)
