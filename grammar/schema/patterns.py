"""Patterns inside JSON strings: where llguidance 1.9 reads them too loosely, and a safe form of them.

Its translation into JSON's escapes goes wrong for a set of characters that has all control characters (the
newline apart) but not both the quote and the backslash: `[^"]` then matches an escaped quote. A negated class
that also excludes U+0000 is exact again, so that is what we compile; a text with U+0000 is then refused.

White space is another set to it than to ECMA-262, which has U+FEFF and not U+0085; so `\\s` and `\\S` are spelt out.
"""

import re
from functools import lru_cache

from ..regex.text import UnknownSyntax, list_sets

CONTROLS = frozenset(range(0x20)) - {0x0A}
# As ranges alone, so that a hyphen after them stays one.
_SPACES = (
    r"\x09-\x0D\x20-\x20\xA0-\xA0\u1680-\u1680\u2000-\u200A\u2028-\u2029\u202F-\u202F\u205F-\u205F\u3000-\u3000"
    r"\uFEFF-\uFEFF"
)
_OTHERS = (
    r"\x00-\x08\x0E-\x1F\x21-\x9F\xA1-\u167F\u1681-\u1FFF\u200B-\u2027\u202A-\u202E\u2030-\u205E\u2060-\u2FFF"
    r"\u3001-\uFEFE\uFF00-\u{10FFFF}"
)
# In a class and outside of one.
_SPELT = {r"\s": (_SPACES, f"[{_SPACES}]"), r"\S": (_OTHERS, f"[^{_SPACES}]")}
_TOKEN = re.compile(r"\\.|\[\^?\]?|.", re.DOTALL)


@lru_cache(maxsize=4096)
def make_safe(pattern: str) -> str | None:
    """Return a pattern that llguidance reads exactly, None when there is none.

    It is the pattern itself or one that excludes U+0000 in addition, with white space spelt out.
    """
    pattern = spell_spaces(pattern)
    try:
        sets = list_sets(pattern)
        if is_exact(sets):
            return pattern
        for offset, members in reversed(sets):
            if pattern.startswith("[^", offset) and is_loose(members):
                pattern = pattern[: offset + 2] + r"\x00" + pattern[offset + 2 :]
        return pattern if is_exact(list_sets(pattern)) else None
    except UnknownSyntax:
        return None


def spell_spaces(pattern: str) -> str:
    """Return a pattern with the white space of ECMA-262 in place of `\\s` and `\\S`."""
    if r"\s" not in pattern and r"\S" not in pattern:
        return pattern
    parts, is_class = [], False
    for token in _TOKEN.findall(pattern):
        is_class = token != "]" if is_class else token.startswith("[")
        parts.append(_SPELT[token][not is_class] if token in _SPELT else token)
    return "".join(parts)


def is_exact(sets: list[tuple[int, frozenset[int]]]) -> bool:
    """Return whether no union of the pattern's sets, as alternatives make them, is read too loosely."""
    return not frozenset().union(*(members for _, members in sets if is_loose(members))) >= CONTROLS


def is_loose(members: frozenset[int]) -> bool:
    """Return whether a set lacks the quote or the backslash."""
    return not members >= {ord('"'), ord("\\")}
