"""Following a structural tag byte by byte: every reading of the text that is still possible.

A position is a place in the graph that needs no memory but two numbers; a live value has a matcher of its own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ..backend import Matcher
from ..engines.llguidance_backend import LLGuidanceMatcher
from .graph import Accept, Fork, FreeText, Leaf, Literal, TagGraph, TokenStep
from .json_shape import START, JsonShape
from .text import UTF8


class Position(NamedTuple):
    """A place between values.

    Attributes:
        at: bytes of a literal that are written, or the state of a free text's automaton.
        inside: the state of a free text's UTF-8.
    """

    node: int
    at: int = 0
    inside: int = 0


class Run:
    """A matcher that reads one value, and how many tokens it has taken."""

    __slots__ = ("foresee", "matcher", "num_tokens")

    def __init__(self, matcher: Matcher) -> None:
        self.matcher = matcher
        self.num_tokens = 0
        # How many of some tokens would be accepted, where the engine can tell that without accepting them.
        self.foresee = matcher.count_valid if isinstance(matcher, LLGuidanceMatcher) else None

    def accept(self, token_id: int) -> bool:
        """Take one token, a whole one or that of a single byte."""
        if not self.matcher.accept_token(token_id):
            return False
        self.num_tokens += 1
        return True

    def rewind(self, num_tokens: int) -> None:
        """Go back to when it had taken so many."""
        if self.num_tokens > num_tokens:
            self.matcher.rollback(self.num_tokens - num_tokens)
            self.num_tokens = num_tokens


class Live(NamedTuple):
    """A value being read.

    Attributes:
        num_tokens: tokens that `run` had consumed at this point; it may have advanced since.
        shape: open brackets and strings of a JSON value, which show when it cannot end yet.
    """

    node: int
    run: Run
    num_tokens: int
    shape: JsonShape


@dataclass(slots=True)
class Reading:
    """All ways to read a text; a text is complete when one of them is at the end."""

    positions: dict[Position, None] = field(default_factory=dict)
    lives: list[Live] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.positions or self.lives)


class Closure:
    """Where one may be at a node, by the byte that comes next: of a thousand literals few begin alike."""

    def __init__(self, reading: Reading, graph: TagGraph) -> None:
        self.has_lives = bool(reading.lives)
        self._literals: dict[int, list[Position]] = {}
        self._others: list[Position] = []
        for position in reading.positions:
            node = graph.nodes[position.node]
            if isinstance(node, Literal):
                self._literals.setdefault(node.text[0], []).append(position)
            else:
                self._others.append(position)

    def read(self, byte: int) -> Reading:
        """Return the readings that may take a byte."""
        return Reading(dict.fromkeys((*self._literals.get(byte, ()), *self._others)))


class Walker:
    """Walks one graph.

    Args:
        make_matchers: node of a leaf -> what gives a matcher at its start.
        byte_ids: for each byte the token of that byte, -1 where no text needs it.
    """

    def __init__(
        self, graph: TagGraph, make_matchers: Mapping[int, Callable[[], Matcher]], byte_ids: tuple[int, ...]
    ) -> None:
        self.graph = graph
        self.byte_ids = byte_ids
        self._make_matchers = make_matchers
        self._closures: dict[int, Closure] = {}

    def enter(self, node: int, into: Reading, seen: set[int]) -> None:
        """Add what a node begins with, and what may come at once because that may be empty."""
        pending = [node]
        while pending:
            index = pending.pop()
            if index in seen:
                continue
            seen.add(index)
            match self.graph.nodes[index]:
                case Fork(targets=targets):
                    pending += reversed(targets)
                case Leaf(next=target):
                    run = Run(self._make_matchers[index]())
                    into.lives.append(Live(index, run, 0, START))
                    if run.matcher.is_completed():
                        pending.append(target)
                case FreeText(next=target):
                    into.positions[Position(index)] = None
                    if target is not None:
                        pending.append(target)
                case Accept() | Literal() | TokenStep():
                    into.positions[Position(index)] = None

    def begin(self) -> Reading:
        """Return the readings of nothing."""
        return self.begin_at(self.graph.start)

    def begin_at(self, *nodes: int) -> Reading:
        """Return the readings of nothing from some nodes on."""
        into, seen = Reading(), set[int]()
        for node in nodes:
            self.enter(node, into, seen)
        return into

    def measure(self, node: int, data: bytes) -> int:
        """Return how many of some bytes may stand at a node."""
        if not data:
            return 0
        found = self._closures.get(node)
        if found is None:
            found = self._closures[node] = Closure(self.begin_at(node), self.graph)
        reading = self.begin_at(node) if found.has_lives else found.read(data[0])
        for length, byte in enumerate(data):
            reading = self._step(reading, byte)
            if not reading:
                return length
        return len(data)

    def leads_on(self, node: int, data: bytes) -> bool:
        """Tell whether some bytes may stand at a node."""
        return self.measure(node, data) == len(data)

    def walk(self, reading: Reading, data: bytes) -> Reading:
        """Return the readings after some bytes; live values in `reading` are moved on, so they must be its own."""
        for byte in data:
            reading = self._step(reading, byte)
            if not reading:
                break
        return reading

    def _step(self, reading: Reading, byte: int) -> Reading:
        into = Reading()
        seen: set[int] = set()
        for position in reading.positions:
            self._step_position(position, byte, into, seen)
        byte_id = self.byte_ids[byte]
        for live in reading.lives:
            if live.run.accept(byte_id):
                self.go_on(live, bytes((byte,)), into, seen)
        return into

    def go_on(self, live: Live, data: bytes, into: Reading, seen: set[int]) -> None:
        """Add a value that has taken some bytes more, and what may follow it."""
        into.lives.append(live._replace(num_tokens=live.run.num_tokens, shape=live.shape.advance(data)))
        if live.run.matcher.is_completed():
            leaf = self.graph.nodes[live.node]
            assert isinstance(leaf, Leaf), "only leaves have matchers"
            self.enter(leaf.next, into, seen)

    def _step_position(self, position: Position, byte: int, into: Reading, seen: set[int]) -> None:
        match self.graph.nodes[position.node]:
            case Literal(text=text, next=target):
                if text[position.at] == byte:
                    self._step_literal(position, position.at + 1, text, target, into, seen)
            case FreeText() as node:
                self._step_text(position, node, byte, into, seen)

    def _step_literal(
        self, position: Position, at: int, text: bytes, target: int, into: Reading, seen: set[int]
    ) -> None:
        if at == len(text):
            self.enter(target, into, seen)
        else:
            into.positions[position._replace(at=at)] = None

    def _step_text(
        self, position: Position, node: FreeText, byte: int, into: Reading, seen: set[int]
    ) -> None:
        inside = UTF8[position.inside][byte]
        if inside < 0:
            return
        self._reach_text(position.node, node, node.automaton.step(position.at, byte), inside, into, seen)

    def _reach_text(
        self, index: int, node: FreeText, at: int, inside: int, into: Reading, seen: set[int]
    ) -> None:
        hit = node.automaton.hits[at]
        if hit >= 0:
            for target in node.targets[hit]:
                self.enter(target, into, seen)
            return
        into.positions[Position(index, at, inside)] = None
        if node.next is not None and not inside:
            self.enter(node.next, into, seen)

    def take_special(self, reading: Reading, token_id: int, name: bytes) -> Reading:
        """Return the readings after a special token: a step of its own, or the characters of its name in a tag.

        Args:
            name: the token as tags spell it, b"" for a token that is not special.
        """
        into = Reading()
        seen: set[int] = set()
        for position in reading.positions:
            match self.graph.nodes[position.node]:
                case TokenStep(token_id=wanted, next=target) if wanted == token_id:
                    self.enter(target, into, seen)
                case Literal(text=text, next=target) if name and text.startswith(name, position.at):
                    self._step_literal(position, position.at + len(name), text, target, into, seen)
                case FreeText() as node if name and not position.inside:
                    # In free text it stands only where a trigger or an end begins with it.
                    at = node.automaton.find_prefix(name)
                    if at is not None:
                        self._reach_text(position.node, node, at, 0, into, seen)
        return into
