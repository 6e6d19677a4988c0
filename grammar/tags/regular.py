"""The text between two values of a structural tag as one regular expression, in llguidance's Lark.

llguidance's lexer takes the longest lexeme and never goes back. So texts that follow each other without a value between
them are joined into one lexeme: state elimination (Brzozowski and McCluskey, 1963) over the nodes in between.
A language is the text of a Lark terminal, "" for the empty text alone.
"""

import json
from collections.abc import Callable, Mapping


def quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def unite(first: str, second: str) -> str:
    """Return the words of either language."""
    if first == second:
        return first
    return f"({first} | {second})" if first and second else f"({first or second})?"


Edges = dict[int, str]


def find_texts(start: int, list_edges: Callable[[int], Mapping[int, str] | None]) -> Edges:
    """Return, for each border that may come next, the text up to it.

    Args:
        list_edges: node -> next node -> the text between them; None for a border.
    """
    edges: dict[int, Edges] = {}
    pending = [start]
    while pending:
        node = pending.pop()
        if node not in edges and (found := list_edges(node)) is not None:
            edges[node] = dict(found)
            pending += found
    if not edges:
        return {start: ""}
    before: dict[int, set[int]] = {}
    for node, targets in edges.items():
        for target in targets:
            before.setdefault(target, set()).add(node)
    for node in [each for each in edges if each != start]:
        eliminate(node, edges, before)
    return close_loop(edges[start], start)


def eliminate(node: int, edges: dict[int, Edges], before: dict[int, set[int]]) -> None:
    """Remove a node: every way through it becomes an edge."""
    targets = close_loop(edges.pop(node), node)
    for source in before.pop(node, set()) - {node}:
        into = edges[source].pop(node)
        for target, text in targets.items():
            way = f"{into} {text}".strip()
            known = edges[source].get(target)
            edges[source][target] = way if known is None else unite(known, way)
            before.setdefault(target, set()).add(source)
    for target in targets:
        before.get(target, set()).discard(node)


def close_loop(targets: Edges, node: int) -> Edges:
    """Return the edges of a node with its edge to itself written into the others."""
    loop = targets.pop(node, None)
    if not loop:
        return targets
    return {target: f"({loop})* {text}".strip() for target, text in targets.items()}
