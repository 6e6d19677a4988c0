"""Free text up to the first of some patterns, as lexemes of llguidance whose masks are quick.

llguidance computes the mask of a lexeme that goes on as `[^...]*` from masks it has ready, and walks through the whole
vocabulary (1.4 ms for 100,000 tokens) for one with a complement or in the middle of a pattern. Hence two forms:

by ends     text in parts that end with the last character of a pattern, which stands nowhere else in one: quick
by words    a complement: any patterns, every state is slow
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from ..regex.text import quote

ANY = "/(?s:.*)/"


class Lexemes(NamedTuple):
    """Free text as terminals.

    Attributes:
        part: a part after which the text goes on, None where there is one part.
        hits: for each pattern the text up to its end.
        tail: a text, not empty, in which no pattern stands.
    """

    part: str | None
    hits: tuple[str, ...]
    tail: str


def make_lexemes(patterns: Sequence[str]) -> Lexemes:
    """Return the terminals of free text, whichever form its patterns allow."""
    if not patterns:
        return Lexemes(None, (), "/(?s:.+)/")
    lasts = {pattern[-1] for pattern in patterns}
    if not any(char in lasts for pattern in patterns for char in pattern[:-1]):
        return split_by_ends(patterns)
    hits = [make_hit(patterns, pattern) for pattern in patterns]
    return Lexemes(None, tuple(hits), f"/(?s:.+)/ & {make_tail(patterns)}")


def split_by_ends(patterns: Sequence[str]) -> Lexemes:
    """Return lexemes that end at the last characters of patterns."""
    lasts = sorted({pattern[-1] for pattern in patterns})
    rest = f"/{make_class(lasts)}*/"
    parts = []
    for last in lasts:
        heads = [f"{rest} {quote(each[:-1])}" if each[:-1] else rest for each in patterns if each[-1] == last]
        parts.append(f"({rest} & ~({' | '.join(heads)})) {quote(last)}")
    hits = tuple(f"{rest} {quote(pattern)}" for pattern in patterns)
    # Where a pattern is a single character, no part ends with it.
    return Lexemes(" | ".join(parts), hits, f"/{make_class(lasts)}+/")


def make_hit(patterns: Sequence[str], pattern: str) -> str:
    """Return the terminal of text that ends with a pattern, before which no other one was complete."""
    return f"{ANY} {quote(pattern)} & ~({ANY} ({' | '.join(map(quote, patterns))}) /(?s:.+)/)"


def make_tail(patterns: Sequence[str]) -> str:
    """Return the terminal of text in which no pattern stands."""
    if not patterns:
        return ANY
    return f"{ANY} & ~({ANY} ({' | '.join(map(quote, patterns))}) {ANY})"


def make_class(chars: set[str] | Sequence[str]) -> str:
    """Return the class of all other characters, inside slashes."""
    return f"[^{''.join(escape(char) for char in sorted(chars))}]"


def escape(char: str) -> str:
    """Return a character as a regular expression between slashes writes it."""
    return f"\\x{{{ord(char):x}}}" if not char.isalnum() or not char.isascii() else re.escape(char)
