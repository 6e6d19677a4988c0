"""Bound the size of a pattern's automaton before anybody builds it.

The pattern is unrolled into positions (Glushkov, 1961) and determinised with a budget. Patterns such as
`.*a.{20}` have a million states, and the engine that would build them cannot be stopped.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from .syntax import Alternatives, CharSet, Node, RegexReader, Repeat, Sequence, UnknownSyntax

MAX_POSITIONS = 1_000
# Steps of the loops below; about 50 ms.
MAX_WORK = 200_000


class TooLarge(Exception):
    """The pattern needs more positions, states or work than allowed."""


def estimate_num_states(pattern: str, max_states: int) -> int | None:
    """Return about how many states a byte automaton of the pattern has.

    None when they may exceed `max_states`, or when the pattern uses syntax that is not analysed.
    """
    try:
        positions = Positions()
        fragment = positions.build(RegexReader(pattern).read())
        return count_states(positions, fragment, max_states)
    except (UnknownSyntax, TooLarge):
        return None


@dataclass(frozen=True, slots=True)
class Fragment:
    """Where a part can start and end; positions are bits of an integer."""

    is_nullable: bool
    first: int
    last: int


EMPTY = Fragment(True, 0, 0)


@dataclass(slots=True)
class Positions:
    """The characters of an unrolled pattern, and which may follow which."""

    char_sets: list[CharSet] = field(default_factory=list)
    follow: list[int] = field(default_factory=list)
    num_steps: int = 0

    def build(self, node: Node) -> Fragment:
        """Add a part's positions."""
        self.spend(1)
        match node:
            case CharSet():
                return self._add_position(node)
            case Sequence(parts):
                return self._chain([(part, False) for part in parts])
            case Alternatives(parts):
                fragments = [self.build(part) for part in parts]
                return Fragment(
                    any(f.is_nullable for f in fragments),
                    merge(f.first for f in fragments),
                    merge(f.last for f in fragments),
                )
            case Repeat(part, minimum, maximum):
                return self._repeat(part, minimum, maximum)

    def spend(self, num_steps: int) -> None:
        """Count work, and stop when it is too much."""
        self.num_steps += num_steps
        if self.num_steps > MAX_WORK:
            raise TooLarge

    def _add_position(self, char_set: CharSet) -> Fragment:
        if len(self.char_sets) >= MAX_POSITIONS:
            raise TooLarge
        # The end marker of engines/outlines_backend.py; a pattern that names it cannot be marked with it.
        if char_set.is_listed and char_set.covers(3):
            raise UnknownSyntax
        bit = 1 << len(self.char_sets)
        self.char_sets.append(char_set)
        self.follow.append(0)
        return Fragment(False, bit, bit)

    def _chain(self, parts: list[tuple[Node, bool]]) -> Fragment:
        """Put parts one after the other; a part marked True may be left out."""
        chain = EMPTY
        for part, is_optional in parts:
            fragment = self.build(part)
            self._connect(chain.last, fragment.first)
            is_nullable = fragment.is_nullable or is_optional
            chain = Fragment(
                chain.is_nullable and is_nullable,
                chain.first | (fragment.first if chain.is_nullable else 0),
                fragment.last | (chain.last if is_nullable else 0),
            )
        return chain

    def _repeat(self, part: Node, minimum: int, maximum: int | None) -> Fragment:
        if (maximum or minimum) > MAX_POSITIONS:
            raise TooLarge
        if maximum is not None:
            return self._chain([(part, index >= minimum) for index in range(maximum)])
        head = self._chain([(part, False)] * max(minimum - 1, 0))
        tail = self.build(part)
        self._connect(tail.last, tail.first)
        self._connect(head.last, tail.first)
        is_tail_nullable = tail.is_nullable or minimum == 0
        return Fragment(
            head.is_nullable and is_tail_nullable,
            head.first | (tail.first if head.is_nullable else 0),
            tail.last | (head.last if is_tail_nullable else 0),
        )

    def _connect(self, last: int, first: int) -> None:
        for index in bits(last):
            self.spend(1)
            self.follow[index] |= first


def count_states(positions: Positions, fragment: Fragment, max_states: int) -> int:
    """Determinise from the start and count states, those inside multi-byte characters included."""
    classes = split_alphabet(positions.char_sets)
    members = [merge(1 << i for i, s in enumerate(positions.char_sets) if s.covers(c)) for c in classes]
    positions.spend(len(classes) * len(positions.char_sets))
    # A state is the set of positions that may come next.
    seen, waiting, total = {fragment.first}, [fragment.first], 2
    while waiting:
        state = waiting.pop()
        total += 1 + sum(s.num_inner for s in {positions.char_sets[index] for index in bits(state)})
        if total > max_states:
            raise TooLarge
        for member in members:
            after = 0
            for index in bits(state & member):
                positions.spend(1)
                after |= positions.follow[index]
            positions.spend(1)
            if state & member and after not in seen:
                seen.add(after)
                waiting.append(after)
    return total


def split_alphabet(char_sets: list[CharSet]) -> list[int]:
    """Return one code point out of each range between neighbouring borders of the sets."""
    borders = {0}
    for char_set in char_sets:
        for low, high in char_set.ranges:
            borders.update((low, high + 1))
    return sorted(borders)


def merge(masks: Iterable[int]) -> int:
    """Return the union of sets of positions."""
    union = 0
    for mask in masks:
        union |= mask
    return union


def bits(mask: int) -> list[int]:
    """Return the positions in a set."""
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found
