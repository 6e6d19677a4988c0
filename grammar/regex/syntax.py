"""The sets of characters in a pattern of Rust's regex syntax: classes, escapes and single characters."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

Ranges = tuple[tuple[int, int], ...]  # inclusive code point ranges

MAX_CODE_POINT = 0x10FFFF
_BEYOND_ASCII = (0x80, MAX_CODE_POINT)
# Beyond ASCII the shorthands are taken as everything.
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
_UNICODE_NAME = re.compile(r"\{\^?[\w=:-]+\}|[A-Z]")


class UnknownSyntax(Exception):
    """The pattern holds something this reader does not know."""


@dataclass(frozen=True, slots=True)
class CharSet:
    """One character out of some inclusive code point ranges, in any order."""

    ranges: Ranges

    def covers(self, code_point: int) -> bool:
        """Tell whether a code point is a member."""
        return any(low <= code_point <= high for low, high in self.ranges)


class ClassScanner:
    """Finds the sets of characters in one pattern, whatever stands between them."""

    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0

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

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _read_known_escape(self) -> CharSet:
        start = self._at
        try:
            return make_char_set(self._read_escape())
        except UnknownSyntax:
            # An assertion or a back reference: no set of characters.
            self._at = start + 2
            return CharSet(())

    def _read_escape(self) -> Ranges:
        self._at += 1
        letter = self._peek()
        hexadecimal = _HEX.match(self._text, self._at)
        if hexadecimal:
            self._at = hexadecimal.end()
            code = int(next(group for group in hexadecimal.groups() if group), 16)
            return ((code, code),)
        self._at += 1
        if letter in _SHORTHANDS:
            return _SHORTHANDS[letter]
        if letter in _CONTROLS:
            return ((_CONTROLS[letter], _CONTROLS[letter]),)
        if letter in ("p", "P"):
            return self._read_unicode_class(letter == "P")
        if not letter or letter.isalnum() or not letter.isascii():
            raise UnknownSyntax
        return ((ord(letter), ord(letter)),)

    def _read_unicode_class(self, is_negated: bool) -> Ranges:
        name = _UNICODE_NAME.match(self._text, self._at)
        if name is None:
            raise UnknownSyntax
        self._at = name.end()
        # No named class that patterns use has ASCII control characters, except those that have them all.
        return ((0, MAX_CODE_POINT),) if is_negated else ()

    def _read_class(self) -> CharSet:
        self._at += 1
        is_negated = self._peek() == "^"
        self._at += is_negated
        ranges: list[tuple[int, int]] = []
        is_first = True
        while self._peek() != "]" or is_first:
            is_first = False
            low = self._read_class_item()
            if len(low) == 1 and low[0][0] == low[0][1] and self._is_range_ahead():
                self._at += 1
                high = self._read_class_item()
                low = ((low[0][0], high[0][1]),)
            ranges.extend(low)
        self._at += 1
        return CharSet(complement(ranges)) if is_negated else make_char_set(tuple(ranges))

    def _is_range_ahead(self) -> bool:
        return self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", "")

    def _read_class_item(self) -> Ranges:
        character = self._peek()
        ahead = self._text[self._at : self._at + 2]
        if character in ("", "[") or ahead in ("&&", "--", "~~"):
            raise UnknownSyntax
        if character == "\\":
            return self._read_escape()
        self._at += 1
        return ((ord(character), ord(character)),)


def make_char_set(ranges: Ranges) -> CharSet:
    """Return a set from the ranges a pattern names."""
    if any(low > high or high > MAX_CODE_POINT for low, high in ranges):
        raise UnknownSyntax
    return CharSet(ranges)


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
