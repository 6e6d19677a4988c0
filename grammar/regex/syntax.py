"""Lists the sets of characters in a pattern: classes, escapes and single characters."""

import re
from functools import lru_cache

from .linear_pattern import read_pattern

_TOKEN = re.compile(
    r"\\(?:x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|[xu]\{[0-9A-Fa-f]{1,6}\}|[pP](?:\{\^?[\w=:-]+\}|[A-Z])|.)"
    r"|\[\^?\]?(?:[^\]\\]|\\.)*\]|.",
    re.DOTALL,
)
_CODE = re.compile(r"\\[xu]\{?([0-9A-Fa-f]{2,6})")
# Inside a class, some engines read these as nesting or subtraction.
_AMBIGUOUS = re.compile(r"\[|&&|--|~~")
_BEYOND_ASCII = "\x80ÿ\u2028\uffff\U0001f600"


class UnknownSyntax(Exception):
    """The pattern holds something this reader does not know."""


def list_sets(pattern: str) -> list[tuple[int, frozenset[int]]]:
    """Return (offset, code points) of each class, escape and character.

    The code points are those of ASCII, and some beyond where there are any; shorthands take all of them.

    Raises:
        UnknownSyntax: a class is not understood.
    """
    return [(token.start(), find_members(token[0])) for token in _TOKEN.finditer(pattern)]


@lru_cache(maxsize=4096)
def find_members(token: str) -> frozenset[int]:
    """Return the code points of one class, escape or character."""
    if token[0] not in "[\\":
        return frozenset([ord(token)])
    is_class = token[0] == "["
    if is_class and (len(token) == 1 or _AMBIGUOUS.search(re.sub(r"\\.", "", token[1:]))):
        raise UnknownSyntax
    known = None if token == "\\" else read_pattern(token)
    if known is None and is_class:
        raise UnknownSyntax
    if known is None:  # A back reference is not a set of characters.
        return frozenset()
    written = {
        *_BEYOND_ASCII,
        *(chr(int(code, 16)) for code in _CODE.findall(token) if int(code, 16) < 0x110000),
    }
    probes = {
        *map(chr, range(0x80)),
        *(char for char in {*written, *token} if not "\ud800" <= char <= "\udfff"),
    }
    return frozenset(ord(char) for char in probes if known(char) is not False)
