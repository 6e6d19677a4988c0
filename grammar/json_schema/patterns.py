"""Patterns inside JSON strings: where llguidance 1.9 reads them too loosely, and a safe form of them.

Its translation into JSON's escapes goes wrong for a set of characters that has all control characters (the
newline apart) but not both the quote and the backslash: `[^"]` then matches an escaped quote. A negated class
that also excludes U+0000 is exact again, so that is what we compile; a text with U+0000 is then refused.
"""

from functools import lru_cache

from ..regex.syntax import CharSet, ClassScanner, UnknownSyntax

CONTROLS = [code for code in range(0x20) if code != 0x0A]


@lru_cache(maxsize=4096)
def make_safe(pattern: str) -> str | None:
    """Return a pattern that llguidance reads exactly, None when there is none.

    It is the pattern itself or one that excludes U+0000 in addition.
    """
    try:
        sets = list(ClassScanner(pattern).scan())
        if is_exact(sets):
            return pattern
        for offset, char_set in reversed(sets):
            if pattern.startswith("[^", offset) and is_loose(char_set):
                pattern = pattern[: offset + 2] + r"\x00" + pattern[offset + 2 :]
        return pattern if is_exact(list(ClassScanner(pattern).scan())) else None
    except UnknownSyntax:
        return None


def is_exact(sets: list[tuple[int, CharSet]]) -> bool:
    """Tell whether no union of the pattern's sets, as alternatives make them, is read too loosely."""
    loose = [char_set for _, char_set in sets if is_loose(char_set)]
    return not all(any(char_set.covers(code) for char_set in loose) for code in CONTROLS)


def is_loose(char_set: CharSet) -> bool:
    """Tell whether a set lacks the quote or the backslash."""
    return not (char_set.covers(ord('"')) and char_set.covers(ord("\\")))
