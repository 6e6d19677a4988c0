"""Helpers for the source text of regular expressions."""

import re
from collections.abc import Sequence

_ESCAPES = {ord(sign): f"\\{sign}" for sign in r"\.+*?()|[]{}^$#&~-"}


def choices_to_regex(choices: Sequence[str]) -> str:
    """Return a pattern for exactly these texts, in the syntax of Rust's regex crate."""
    return "(?:" + "|".join(escape(choice) for choice in choices) + ")"


def escape(text: str) -> str:
    """Escape a text for Rust's regex syntax, which takes fewer escapes of letters than Python's."""
    return text.translate(_ESCAPES)


def ends_in_escape(pattern: str) -> bool:
    """Return whether a pattern ends with a backslash that escapes nothing. llguidance would read on behind its end."""
    return (len(pattern) - len(pattern.rstrip("\\"))) % 2 == 1


def explain_pattern(pattern: str, message: str) -> str:
    """Return what is wrong with a pattern and where, out of the complaint of Rust's regex parser.

    The parser writes the pattern, carets below what it does not like, and `error: ` with the reason; around that
    stands the grammar in which the engine wrapped the pattern.
    """
    reason = re.search(r"^error: (.+)$", message, re.MULTILINE)
    if reason is None:
        return message.strip().split("\n")[0]
    carets = re.search(r"^ {4}( *)\^+$", message, re.MULTILINE)
    if carets is None or "\n" in pattern:
        return reason[1]
    return f"{reason[1]}, at character {len(carets[1]) + 1}"
