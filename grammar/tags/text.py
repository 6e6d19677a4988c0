"""Free text between tags, byte by byte: which pattern has just been written, and whether the bytes are UTF-8."""

from collections import deque
from collections.abc import Sequence

# UTF-8 by the table of the Unicode standard (3-7): state -> ((first byte, last byte, next state), ...).
# State 0 is between two characters.
_UTF8_EDGES = (
    (
        *((0x00, 0x7F, 0), (0xC2, 0xDF, 1), (0xE0, 0xE0, 2), (0xE1, 0xEC, 3), (0xED, 0xED, 4)),
        *((0xEE, 0xEF, 3), (0xF0, 0xF0, 5), (0xF1, 0xF3, 6), (0xF4, 0xF4, 7)),
    ),
    ((0x80, 0xBF, 0),),
    ((0xA0, 0xBF, 1),),
    ((0x80, 0xBF, 1),),
    ((0x80, 0x9F, 1),),
    ((0x90, 0xBF, 3),),
    ((0x80, 0xBF, 3),),
    ((0x80, 0x8F, 3),),
)
NUM_UTF8_STATES = len(_UTF8_EDGES)


def _make_table() -> tuple[tuple[int, ...], ...]:
    table = [[-1] * 256 for _ in _UTF8_EDGES]
    for state, edges in enumerate(_UTF8_EDGES):
        for first, last, target in edges:
            for byte in range(first, last + 1):
                table[state][byte] = target
    return tuple(tuple(row) for row in table)


# UTF8[state][byte] is the next state, -1 where the byte cannot stand.
UTF8 = _make_table()


def follow_utf8(state: int, data: bytes) -> int:
    """Return the state after some bytes, -1 when they cannot stand there."""
    for byte in data:
        state = UTF8[state][byte]
        if state < 0:
            break
    return state


class PatternAutomaton:
    """Finds the first of some patterns to be completed in a text.

    State 0 is the start; no pattern may lie within another one, so at most one is completed at a time.
    Source: Aho and Corasick, "Efficient string matching", 1975.
    """

    def __init__(self, patterns: Sequence[bytes]) -> None:
        self.patterns = tuple(patterns)
        self._edges: list[dict[int, int]] = [{}]
        self._fails = [0]
        # hits[state] is the index of the pattern completed there, -1 for none; texts[state] what led to it.
        self.hits = [-1]
        self.texts = [b""]
        for index, pattern in enumerate(patterns):
            self._add(index, pattern)
        self._link()

    def step(self, state: int, byte: int) -> int:
        """Return the state after one byte."""
        edges, fails = self._edges, self._fails
        while byte not in edges[state]:
            if not state:
                return 0
            state = fails[state]
        return edges[state][byte]

    def find_rests(self, state: int) -> list[bytes]:
        """Return what would complete a pattern that has been begun."""
        rests = []
        while state:
            begun = self.texts[state]
            rests += [p[len(begun) :] for p in self.patterns if p.startswith(begun) and len(p) > len(begun)]
            state = self._fails[state]
        return rests

    def find_prefix(self, text: bytes) -> int | None:
        """Return the state of a text that begins a pattern, None when it begins none."""
        state = 0
        for byte in text:
            found = self._edges[state].get(byte)
            if found is None:
                return None
            state = found
        return state

    def _add(self, index: int, pattern: bytes) -> None:
        state = 0
        for position, byte in enumerate(pattern, 1):
            if byte not in self._edges[state]:
                self._edges[state][byte] = len(self._edges)
                self._edges.append({})
                self._fails.append(0)
                self.hits.append(-1)
                self.texts.append(pattern[:position])
            state = self._edges[state][byte]
        self.hits[state] = index

    def _link(self) -> None:
        pending = deque(self._edges[0].values())
        while pending:
            state = pending.popleft()
            for byte, target in self._edges[state].items():
                pending.append(target)
                self._fails[target] = self.step(self._fails[state], byte) if state else 0
                if self.hits[target] < 0:
                    self.hits[target] = self.hits[self._fails[target]]
