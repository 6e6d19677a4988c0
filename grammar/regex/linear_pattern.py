"""Match a whole text against a pattern in time linear in the text, by Rust's regex engine.

Python's `re` goes back and tries again: `(a+)+b` against forty letters keeps it busy for hours, and nothing can stop
it. jsonschema-rs brings an engine that never goes back. It reads the shorthands as JSON Schema does, over ASCII alone.
"""

import re
from functools import lru_cache

import jsonschema_rs

# These mean more to the grammar engines than to this one, once a text leaves ASCII.
_SHORTHAND = re.compile(r"\\[dDwWsSbBpP]|\(\?[A-Za-z]*i")
# What Rust's regex crate may use for one pattern.
_SIZE_LIMIT = 10 * 1024 * 1024
# Word borders and possessive repetitions: read here, but the engine that goes back goes back for them.
_BACKTRACKING = re.compile(r"\\[bB]|[*+?}]\+")


class LinearPattern:
    """A pattern that stands for whole texts.

    Raises:
        ValueError: the engine does not take the pattern: look-around, back references, an automaton over the limit.
    """

    def __init__(self, pattern: str) -> None:
        options = jsonschema_rs.RegexOptions(size_limit=_SIZE_LIMIT, dfa_size_limit=_SIZE_LIMIT)
        schema = {"pattern": f"^(?:{pattern})$"}
        self._has_shorthand = _SHORTHAND.search(pattern) is not None
        try:
            self._validator = jsonschema_rs.Draft202012Validator(
                schema, pattern_options=options, offline=True
            )
        except jsonschema_rs.ValidationError as error:
            raise ValueError(f"the pattern cannot be matched in linear time: {error.message}") from error

    def matches(self, text: str) -> bool | None:
        """Return whether a text matches from start to end; None where that depends on what a shorthand means."""
        if self._has_shorthand and not text.isascii():
            return None
        return self._validator.is_valid(text)


def may_backtrack(pattern: str) -> bool:
    """Return whether a JSON Schema validator needs more than linear time for a pattern."""
    return _BACKTRACKING.search(pattern) is not None or read_pattern(pattern) is None


@lru_cache(maxsize=256)
def read_pattern(pattern: str) -> LinearPattern | None:
    """Return a pattern ready to match, None where it cannot be."""
    try:
        return LinearPattern(pattern)
    except ValueError:
        return None
