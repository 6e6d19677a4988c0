"""Small facts about patterns as text."""

import re
from collections.abc import Sequence


def choices_to_regex(choices: Sequence[str]) -> str:
    """Return a pattern for exactly these texts, in the syntax of Rust's regex crate."""
    return "(?:" + "|".join(escape(choice) for choice in choices) + ")"


def escape(text: str) -> str:
    """Escape a text for Rust's regex syntax, which takes fewer escapes of letters than Python's."""
    return re.sub(r"[\\.+*?()|\[\]{}^$#&~-]", r"\\\g<0>", text)
