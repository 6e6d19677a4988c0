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
    # What no pattern matches any more would be additional.
    "patternProperties": ("additionalProperties",),
}
# What llguidance may refuse and a validator can check.
_DROPPABLE = frozenset(
    [
        *("minProperties", "maxProperties", "patternProperties", "pattern", "format", "multipleOf"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    ]
)
# What one document may say more than the schema.
MAX_NUM_GUIDES = 256


class Weakening:
    """The keywords of each node that llguidance gets.

    Attributes:
        dropped: user's node -> its keywords that residual checks enforce.
        is_guided: what is left out leaves a guide behind, where there is one.
    """

    def __init__(self, gaps: list[Gap], around: Surroundings) -> None:
        self.is_guided = True
        self.dropped: dict[Node, list[str]] = {}
        self._nodes = frozenset(around.nodes)
        self._read: dict[Node, dict[str, Any]] = {}
        self._around = around
        # A `minProperties` that repeated names could make up still guides; it is only not enough.
        self._counted = {gap.node for gap in gaps if gap.keyword == "minProperties"}
        self._num_guides_left = 0
        for gap in gaps:
            self.drop(gap.node, gap.keyword)

    def start(self) -> None:
        """Begin to write a document, with a number of guides of its own."""
        self._num_guides_left = MAX_NUM_GUIDES if self.is_guided else 0
        self._read.clear()

    def drop(self, node: Node, keyword: str) -> None:
        """Leave a keyword and its companions to the checks."""
        dropped = self.dropped.setdefault(node, [])
        names = [keyword, *_COMPANIONS.get(keyword, ())]
        dropped.extend(name for name in names if name in node.keywords and name not in dropped)

    def drop_refused(self, node: Node, keyword: str, reason: str) -> bool:
        """Leave a keyword that the engine refused to the checks; False when they cannot take its place."""
        # A schema that refers to itself cannot be met with another; the others still guide.
        is_circular = keyword == "$ref" and "ircular" in reason
        return (keyword in _DROPPABLE or keyword == "oneOf" or is_circular) and self.drop_unsaid(
            node, keyword
        )

    def drop_unsaid(self, node: Node, keyword: str) -> bool:
        """Leave a keyword that cannot be said to the checks; False when nothing changes by that."""
        if keyword == "minProperties" and node in self._counted:
            self._counted.discard(node)
            return True
        if keyword in self.dropped.get(node, ()) or keyword not in node.keywords or self.is_guide(node):
            return False
        self.drop(node, keyword)
        return True

    def is_guide(self, node: Node) -> bool:
        """Tell whether a node is none of the user's, so that what it says may be left out."""
        return node not in self._nodes

    def read(self, node: Node) -> dict[str, Any]:
        """Return the keywords of a node that the engine gets; the same object until the next start."""
        if node not in self._read:
            self._read[node] = self._weaken(node)
        return self._read[node]

    def _weaken(self, node: Node) -> dict[str, Any]:
        is_own = node in self._nodes
        dropped = self.dropped.get(node, []) if is_own else self._list_gaps(node)
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
        added += self._list_guides(node, dropped) if is_own else []
        return {**kept, "allOf": [*kept.get("allOf", ()), *added]} if added else kept

    def _list_guides(self, node: Node, dropped: list[str]) -> list[Node]:
        found: list[Node] = []
        for keyword in dropped if self._num_guides_left > 0 else ():
            found += find_guides(node, keyword)
        self._num_guides_left -= len(found)
        return found

    def _list_gaps(self, node: Node) -> list[str]:
        """Return what is left out of a guide, which may itself say more than an engine takes."""
        return [gap.keyword for gap in find_gaps(node, self._around)]
