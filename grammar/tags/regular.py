"""The text between two values of a structural tag as one regular expression, in llguidance's Lark.

llguidance's lexer takes the longest lexeme and never goes back. So texts that follow each other without a value between
them are joined into one lexeme: state elimination (Brzozowski and McCluskey, 1963) over the nodes in between.
"""

import json
from collections.abc import Callable, Mapping
from typing import NamedTuple

# Languages of at most so many words are compared word by word.
MAX_NUM_WORDS = 1024


class Piece(NamedTuple):
    """A regular language.

    Attributes:
        text: as a Lark terminal; "" for the empty text alone.
        words: all its words, None when they are too many.
    """

    text: str
    words: frozenset[str] | None


EMPTY = Piece("", frozenset([""]))


def quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def make_literal(text: str) -> Piece:
    return Piece(quote(text), frozenset([text])) if text else EMPTY


def concat(first: Piece, second: Piece) -> Piece:
    """Return the language of a word of the first and one of the second."""
    if not first.text or not second.text:
        return second if not first.text else first
    words = None
    if first.words is not None and second.words is not None:
        if len(first.words) == len(second.words) == 1:
            return make_literal("".join((*first.words, *second.words)))
        if len(first.words) * len(second.words) <= MAX_NUM_WORDS:
            words = frozenset(a + b for a in first.words for b in second.words)
    return Piece(f"{first.text} {second.text}", words)


def unite(first: Piece, second: Piece) -> Piece:
    """Return the words of either language."""
    if first.text == second.text:
        return first
    words = None if first.words is None or second.words is None else first.words | second.words
    if not first.text or not second.text:
        return Piece(f"({first.text or second.text})?", words)
    return Piece(f"({first.text} | {second.text})", words)


def repeat(piece: Piece) -> Piece:
    """Return the language of any number of words of a language."""
    return Piece(f"({piece.text})*", None) if piece.text else EMPTY


Edges = dict[int, Piece]


def find_texts(start: int, list_edges: Callable[[int], Mapping[int, Piece] | None]) -> dict[int, Piece]:
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
        return {start: EMPTY}
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
        for target, piece in targets.items():
            way = concat(into, piece)
            known = edges[source].get(target)
            edges[source][target] = way if known is None else unite(known, way)
            before.setdefault(target, set()).add(source)
    for target in targets:
        before.get(target, set()).discard(node)


def close_loop(targets: Edges, node: int) -> Edges:
    """Return the edges of a node with its edge to itself written into the others."""
    loop = targets.pop(node, None)
    if loop is None:
        return targets
    return {target: concat(repeat(loop), piece) for target, piece in targets.items()}
