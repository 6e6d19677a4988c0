"""Weaken a schema: leave out what no engine enforces, so that a residual check can enforce it.

Only assertions are left out, and only where schemas add up (never inside `not` or `if`, which are left out as a
whole), so the weakened schema accepts every valid instance. `oneOf` stays while the engine can show that its
branches exclude each other, and becomes `anyOf` where it cannot.
"""

from typing import Any

from .exactness import Gap, Surroundings, find_gaps
from .guides import find_guides
from .node import Node, Schema

# Keywords that mean nothing, or something else, without the first one.
_COMPANIONS: dict[str, tuple[str, ...]] = {
    "if": ("then", "else"),
    "contains": ("minContains", "maxContains"),
    # Properties that no pattern matches any more would count as additional.
    "patternProperties": ("additionalProperties",),
}
# Keywords that llguidance may refuse and a validator can check.
_DROPPABLE = frozenset(
    [
        *("oneOf", "minProperties", "maxProperties", "patternProperties", "pattern", "format", "multipleOf"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    ]
)
# Largest number of guides in one document.
MAX_NUM_GUIDES = 256


class Weakening:
    """The keywords of each node that llguidance gets.

    Attributes:
        dropped: user's node -> its keywords that residual checks enforce.
        is_guided: guides replace the keywords that are left out, where possible.
    """

    def __init__(self, gaps: list[Gap], around: Surroundings) -> None:
        self.is_guided = True
        self.dropped: dict[Node, list[str]] = {}
        self._nodes = frozenset(around.nodes)
        self._read: dict[Node, dict[str, Any]] = {}
        self._around = around
        # A `minProperties` that repeated names could satisfy still guides; it is only too weak.
        self._counted = {gap.node for gap in gaps if gap.keyword == "minProperties"}
        self._num_guides_left = 0
        for gap in gaps:
            self.drop(gap.node, gap.keyword)

    def start(self) -> None:
        """Begin a document with a new allowance of guides."""
        self._num_guides_left = MAX_NUM_GUIDES if self.is_guided else 0
        self._read.clear()

    def drop(self, node: Node, keyword: str) -> None:
        dropped = self.dropped.setdefault(node, [])
        names = [keyword, *_COMPANIONS.get(keyword, ())]
        dropped.extend(name for name in names if name in node.keywords and name not in dropped)

    def drop_refused(self, node: Node, keyword: str, reason: str) -> bool:
        """Leave a keyword that the engine refused to the checks; False if no check can enforce it."""
        # A schema that refers to itself cannot be combined with another; the others still guide.
        is_circular = keyword == "$ref" and "ircular" in reason
        return (keyword in _DROPPABLE or is_circular) and self.drop_inexpressible(node, keyword)

    def drop_inexpressible(self, node: Node, keyword: str) -> bool:
        """Leave a keyword that cannot be expressed to the checks; False if that changes nothing."""
        if keyword == "minProperties" and node in self._counted:
            self._counted.discard(node)
            return True
        if keyword in self.dropped.get(node, ()) or keyword not in node.keywords or self.is_guide(node):
            return False
        self.drop(node, keyword)
        return True

    def is_guide(self, node: Node) -> bool:
        """Return whether a node was added as a guide, which may be left out."""
        return node not in self._nodes

    def read(self, node: Node) -> dict[str, Any]:
        """Return the keywords of a node that the engine gets; the same object until the next start."""
        if node not in self._read:
            self._read[node] = self._weaken(node)
        return self._read[node]

    def _weaken(self, node: Node) -> dict[str, Any]:
        is_own = node in self._nodes
        # A guide may itself exceed what an engine enforces.
        dropped = (self.dropped.get(node, []) if is_own else [gap.keyword for gap in find_gaps(node, self._around)])
        if not dropped:
            return node.keywords
        kept = {
            keyword: value
            for keyword, value in node.keywords.items()
            if keyword not in dropped or (keyword == "minProperties" and node in self._counted)
        }
        added: list[Schema] = []
        if "oneOf" in dropped:
            branches = node.keywords["oneOf"]
            added = [Node("", {"anyOf": branches})] if "anyOf" in kept else []
            kept.setdefault("anyOf", branches)
        if is_own and self._num_guides_left > 0:
            guides = [guide for keyword in dropped for guide in find_guides(node, keyword)]
            self._num_guides_left -= len(guides)
            added += guides
        return {**kept, "allOf": [*kept.get("allOf", ()), *added]} if added else kept
