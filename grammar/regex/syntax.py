"""A reader for the common part of Rust's regex syntax, to judge a pattern's size before an engine gets it.

What it does not know (flags, anchors, Unicode classes by name, class arithmetic) it reports as unknown; such
patterns then go to an engine that bounds itself.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

Ranges = tuple[tuple[int, int], ...]  # inclusive code point ranges

MAX_CODE_POINT = 0x10FFFF
_BEYOND_ASCII = (0x80, MAX_CODE_POINT)
# Beyond ASCII the shorthands are taken as everything: more overlap than there is, so more states, not fewer.
_SHORTHANDS: dict[str, Ranges] = {
    "d": ((48, 57), _BEYOND_ASCII),
    "w": ((48, 57), (65, 90), (95, 95), (97, 122), _BEYOND_ASCII),
    "s": ((9, 13), (32, 32), _BEYOND_ASCII),
    "D": ((0, 47), (58, MAX_CODE_POINT)),
    "W": ((0, 47), (58, 64), (91, 94), (96, 96), (123, MAX_CODE_POINT)),
    "S": ((0, 8), (14, 31), (33, MAX_CODE_POINT)),
}
_CONTROLS = {"n": 10, "t": 9, "r": 13, "f": 12, "v": 11, "a": 7}
_HEX = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|[xu]\{([0-9A-Fa-f]{1,6})\}")
_COUNT = re.compile(r"\{(\d{1,6})(,(\d{0,6}))?\}")
_UNICODE_NAME = re.compile(r"\{\^?[\w=:-]+\}|[A-Z]")
_GROUP = re.compile(r"\((?:\?:|\?P?<[A-Za-z_]\w*>|(?!\?))")


class UnknownSyntax(Exception):
    """The pattern holds something this reader does not know."""


@dataclass(frozen=True, slots=True)
class CharSet:
    """One character out of some ranges.

    Attributes:
        ranges: inclusive code point ranges, in any order.
        num_inner: automaton states that lie inside its UTF-8 encodings.
        is_listed: the pattern names the members one by one.
    """

    ranges: Ranges
    num_inner: int = 0
    is_listed: bool = False

    def covers(self, code_point: int) -> bool:
        """Tell whether a code point is a member."""
        return any(low <= code_point <= high for low, high in self.ranges)


@dataclass(frozen=True, slots=True)
class Sequence:
    """Parts one after the other."""

    parts: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Alternatives:
    """One of several parts."""

    parts: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """A part `minimum` to `maximum` times; None is without end."""

    part: "Node"
    minimum: int
    maximum: int | None


Node = CharSet | Sequence | Alternatives | Repeat


class RegexReader:
    """Reads one pattern from left to right."""

    MAX_DEPTH = 50

    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0
        self._depth = 0

    def read(self) -> Node:
        """Return the whole pattern, or raise UnknownSyntax."""
        node = self._read_alternatives()
        if self._at < len(self._text):
            raise UnknownSyntax
        return node

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _read_alternatives(self) -> Node:
        parts = [self._read_sequence()]
        while self._peek() == "|":
            self._at += 1
            parts.append(self._read_sequence())
        return parts[0] if len(parts) == 1 else Alternatives(tuple(parts))

    def _read_sequence(self) -> Node:
        parts: list[Node] = []
        while self._peek() not in ("", "|", ")"):
            parts.append(self._read_repeats(self._read_atom()))
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _read_repeats(self, node: Node) -> Node:
        while True:
            sign = self._peek()
            if sign and sign in "*+?":
                self._at += 1
                node = Repeat(node, int(sign == "+"), 1 if sign == "?" else None)
            elif sign == "{":
                count = _COUNT.match(self._text, self._at)
                if count is None:
                    raise UnknownSyntax
                self._at = count.end()
                low, high = int(count[1]), count[3] if count[2] else count[1]
                node = Repeat(node, low, int(high) if high else None)
            else:
                return node
            # Laziness changes which match is found, not which texts match.
            self._at += self._peek() == "?"

    def _read_atom(self) -> Node:
        character = self._peek()
        if character == "(":
            return self._read_group()
        if character == "[":
            return self._read_class()
        if character == ".":
            self._at += 1
            return CharSet(((0, 9), (11, MAX_CODE_POINT)), 17)
        if character == "\\":
            return make_char_set(*self._read_escape())
        if character in "*+?{^$":
            raise UnknownSyntax
        self._at += 1
        return make_char_set(((ord(character), ord(character)),))

    def _read_group(self) -> Node:
        opening = _GROUP.match(self._text, self._at)
        self._depth += 1
        if opening is None or self._depth > self.MAX_DEPTH:
            raise UnknownSyntax
        self._at = opening.end()
        node = self._read_alternatives()
        if self._peek() != ")":
            raise UnknownSyntax
        self._at += 1
        self._depth -= 1
        return node

    def _read_escape(self) -> tuple[Ranges, int]:
        """Return the ranges of an escape and the states inside its encodings."""
        self._at += 1
        letter = self._peek()
        hexadecimal = _HEX.match(self._text, self._at)
        if hexadecimal:
            self._at = hexadecimal.end()
            code = int(next(group for group in hexadecimal.groups() if group), 16)
            return ((code, code),), 0
        self._at += 1
        if letter in _SHORTHANDS and letter:
            # Counted in outlines-core: 50 inner states for digits, 316 for word characters, fewer for spaces.
            return _SHORTHANDS[letter], {"d": 60, "s": 20}.get(letter.lower(), 330)
        if letter in _CONTROLS and letter:
            return ((_CONTROLS[letter], _CONTROLS[letter]),), 0
        if letter in ("p", "P"):
            return self._read_unicode_class(letter == "P"), 0
        if not letter or letter.isalnum() or not letter.isascii():
            raise UnknownSyntax
        return ((ord(letter), ord(letter)),), 0

    def _read_unicode_class(self, is_negated: bool) -> Ranges:
        raise UnknownSyntax

    def _read_class(self) -> CharSet:
        self._at += 1
        is_negated = self._peek() == "^"
        self._at += is_negated
        ranges: list[tuple[int, int]] = []
        num_inner, is_first = 0, True
        while self._peek() != "]" or is_first:
            is_first = False
            low, inner = self._read_class_item()
            num_inner += inner
            if len(low) == 1 and low[0][0] == low[0][1] and self._is_range_ahead():
                self._at += 1
                high, _ = self._read_class_item()
                low = ((low[0][0], high[0][1]),)
            ranges.extend(low)
        self._at += 1
        if is_negated:
            return CharSet(complement(ranges), num_inner + 12 * len(ranges) + 9)
        return make_char_set(tuple(ranges), num_inner)

    def _is_range_ahead(self) -> bool:
        return self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", "")

    def _read_class_item(self) -> tuple[Ranges, int]:
        character = self._peek()
        ahead = self._text[self._at : self._at + 2]
        if character in ("", "[") or ahead in ("&&", "--", "~~"):
            raise UnknownSyntax
        if character == "\\":
            return self._read_escape()
        self._at += 1
        return ((ord(character), ord(character)),), 0


class ClassScanner(RegexReader):
    """Finds the sets of characters in a pattern, whatever stands between them."""

    def scan(self) -> Iterator[tuple[int, CharSet]]:
        """Yield (offset, set) of each class, escape and character; UnknownSyntax for a class not understood."""
        while self._at < len(self._text):
            start, character = self._at, self._peek()
            if character == "[":
                yield start, self._read_class()
            elif character == "\\":
                yield start, self._read_known_escape()
            else:
                self._at += 1
                yield start, make_char_set(((ord(character), ord(character)),))

    def _read_known_escape(self) -> CharSet:
        start = self._at
        try:
            return make_char_set(*self._read_escape())
        except UnknownSyntax:
            # An assertion or a back reference: no set of characters.
            self._at = start + 2
            return CharSet(())

    def _read_unicode_class(self, is_negated: bool) -> Ranges:
        name = _UNICODE_NAME.match(self._text, self._at)
        if name is None:
            raise UnknownSyntax
        self._at = name.end()
        # No named class that patterns use has ASCII control characters, except those that have them all.
        return ((0, MAX_CODE_POINT),) if is_negated else ()


def make_char_set(ranges: Ranges, num_inner: int = 0) -> CharSet:
    """Return a set from the ranges a pattern names."""
    if any(low > high or high > MAX_CODE_POINT for low, high in ranges):
        raise UnknownSyntax
    if num_inner:
        return CharSet(ranges, num_inner)
    num_inner = sum(12 if high > 0x7F and high > low else 3 if high > 0x7F else 0 for low, high in ranges)
    return CharSet(ranges, num_inner, is_listed=True)


def complement(ranges: list[tuple[int, int]]) -> Ranges:
    """Return the code points outside `ranges`."""
    result, start = [], 0
    for low, high in sorted(ranges):
        if low > start:
            result.append((start, low - 1))
        start = max(start, high + 1)
    if start <= MAX_CODE_POINT:
        result.append((start, MAX_CODE_POINT))
    return tuple(result)
