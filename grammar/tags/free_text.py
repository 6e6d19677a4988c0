"""Free text up to the first of some patterns, as lexemes of llguidance whose masks are quick.

llguidance computes the mask of a lexeme that goes on as `[^...]*` from masks it has ready, and walks through the whole
vocabulary (1.4 ms for 100,000 tokens) for one with a complement or in the middle of a pattern. Hence three forms:

by ends     text in parts that end with the last character of a pattern: every state is quick
by starts   no pattern has the first character of another one inside: only what begins a pattern is slow
by words    a complement: any patterns, every state is slow
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from ..regex.text import quote

ANY = "/(?s:.*)/"
MAX_NESTED = 100  # groups inside each other; the engine has a limit


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
    firsts = {pattern[0] for pattern in patterns}
    is_short = max(map(len, patterns)) <= MAX_NESTED
    if is_short and not any(char in firsts for pattern in patterns for char in pattern[1:]):
        return split_by_starts(patterns)
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


def split_by_starts(patterns: Sequence[str]) -> Lexemes:
    """Return lexemes in which what begins a pattern and does not go on so is written out."""
    firsts = {pattern[0] for pattern in patterns}
    # Any number of beginnings may be broken off by the next one.
    begun, wrong = write_beginnings(patterns), write_wrong(patterns, firsts)
    part = f"/{make_class(firsts)}+|(?:{begun})*(?:{wrong})/"
    return Lexemes(part, tuple(f"/(?:{begun})*/ {quote(pattern)}" for pattern in patterns), f"/(?:{begun})+/")


def group_by_first(patterns: Sequence[str]) -> dict[str, list[str]]:
    """Return first character -> what follows it in the patterns that have more."""
    found: dict[str, list[str]] = {}
    for pattern in patterns:
        if pattern[1:]:
            found.setdefault(pattern[0], []).append(pattern[1:])
    return found


def write_beginnings(patterns: Sequence[str]) -> str:
    """Return the regular expression of the beginnings of patterns, neither empty nor whole; "" for none."""
    ways = [(first, write_beginnings(rests)) for first, rests in group_by_first(patterns).items()]
    return "|".join(escape(first) + (f"(?:{more})?" if more else "") for first, more in ways)


def write_wrong(patterns: Sequence[str], firsts: set[str]) -> str:
    """Return that of beginnings with a character behind that neither goes on nor begins a pattern."""
    ways = []
    for first, rests in group_by_first(patterns).items():
        more = write_wrong(rests, firsts)
        stop = make_class(firsts | {rest[0] for rest in rests})
        ways.append(f"{escape(first)}(?:{stop}{more and f'|{more}'})")
    return "|".join(ways)


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
