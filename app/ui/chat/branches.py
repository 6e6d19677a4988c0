"""The versions of a chat: its turns are a tree, and a page shows the path to one leaf.

question ─▶ answer ─▶ question ─▶ answer       a retried answer, an edited question, or a question that another tab asks
                 └──▶ question ─▶ answer       at the same place, is a further child
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.ui.chat.conversation import History


@dataclass(frozen=True, slots=True)
class Node:
    """A question, or an answer with its reasoning and figures; `before` is the id of the node that it follows."""

    id: str
    before: str | None
    messages: History = field(default_factory=list)

    @property
    def is_question(self) -> bool:
        return bool(self.messages) and self.messages[0]["role"] == "user"


class Tree:
    """The nodes of a chat, in the order in which they were added."""

    def __init__(self, nodes: Iterable[Node] = ()) -> None:
        self.nodes = {node.id: node for node in nodes}
        self._children: dict[str | None, list[Node]] = {}
        for node in self.nodes.values():
            self._children.setdefault(node.before, []).append(node)

    def find_path(self, leaf: str | None) -> list[Node]:
        """Return the nodes from the first question to a leaf."""
        path: list[Node] = []
        while leaf in self.nodes:
            path.append(self.nodes[leaf])
            leaf = path[-1].before
        return path[::-1]

    def find_leaf(self, node_id: str | None) -> str | None:
        """Return the end of the latest version after a node."""
        while children := self._children.get(node_id):
            node_id = children[-1].id
        return node_id

    def list_versions(self, node: Node) -> list[Node]:
        """Return the nodes at the place of a node, itself included."""
        return self._children[node.before]

    def list_after(self, node_id: str) -> list[str]:
        """Return the ids of a node and of all that follow it."""
        return [node_id, *(each for child in self._children.get(node_id, ()) for each in self.list_after(child.id))]

    def describe(self, path: Sequence[Node]) -> list[dict[str, Any]]:
        """Describe each node of a path that has several versions: its message and turn, its version, their number."""
        shown, at, turn = [], 0, 0
        for node in path:
            turn += node.is_question
            versions = self.list_versions(node)
            if len(versions) > 1:
                active = [each.id for each in versions].index(node.id)
                found = {"at": at, "turn": turn, "is_question": node.is_question, "active": active}
                shown.append(found | {"count": len(versions)})
            at += len(node.messages)
        return shown


def join(path: Iterable[Node]) -> History:
    return [message for node in path for message in node.messages]


def find_place(path: Sequence[Node], index: int) -> int:
    """Return the position in a path of the node that holds a message of its history."""
    at = 0
    for place, node in enumerate(path):
        at += len(node.messages)
        if index < at:
            return place
    return len(path)
