"""Patterns inside JSON strings: where llguidance 1.9 reads them too loosely, and a safe form of them.

Its translation into JSON's escapes goes wrong for a set of characters that has all control characters (the
newline apart) but not both the quote and the backslash: `[^"]` then matches an escaped quote. A negated class
that also excludes U+0000 is exact again, so that is what we compile; a text with U+0000 is then refused.
"""

from functools import lru_cache

from ..regex.text import UnknownSyntax, list_sets

CONTROLS = frozenset(range(0x20)) - {0x0A}


@lru_cache(maxsize=4096)
def make_safe(pattern: str) -> str | None:
    """Return a pattern that llguidance reads exactly, None when there is none.

    It is the pattern itself, as `read_ecma` returns it, or one that excludes U+0000 in addition.
    """
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


def is_exact(sets: list[tuple[int, frozenset[int]]]) -> bool:
    """Return whether no union of the pattern's sets, as alternatives make them, is read too loosely."""
    return not frozenset().union(*(members for _, members in sets if is_loose(members))) >= CONTROLS


def is_loose(members: frozenset[int]) -> bool:
    return not members >= {ord('"'), ord("\\")}
