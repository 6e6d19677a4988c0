"""Match a whole text against a pattern in time linear in the text, by Rust's regex engine.

Python's `re` goes back and tries again: `(a+)+b` against forty letters keeps it busy for hours, and nothing can stop
it. jsonschema-rs brings an engine that never goes back. It reads the shorthands as JSON Schema does, over ASCII alone.
"""

import re
from collections.abc import Callable
from functools import lru_cache

import jsonschema_rs

Matches = Callable[[str], bool | None]
# These mean more to the grammar engines than to this one, once a text leaves ASCII.
_SHORTHAND = re.compile(r"\\[dDwWsSbBpP]|\(\?[A-Za-z]*i")
# What Rust's regex crate may use for one pattern.
_SIZE_LIMIT = 10 * 1024 * 1024
# Word borders and possessive repetitions: read here, but the engine that goes back goes back for them.
_BACKTRACKING = re.compile(r"\\[bB]|[*+?}]\+")


def may_backtrack(pattern: str) -> bool:
    """Return whether a JSON Schema validator needs more than linear time for a pattern."""
    return _BACKTRACKING.search(pattern) is not None or read_pattern(pattern) is None


@lru_cache(maxsize=256)
def read_pattern(pattern: str) -> Matches | None:
    """Return what tells whether a text matches a pattern from start to end.

    It returns None where that depends on what a shorthand means. There is none for a pattern that the engine does not
    take: look-around, back references, an automaton over the limit.
    """
    options = jsonschema_rs.RegexOptions(size_limit=_SIZE_LIMIT, dfa_size_limit=_SIZE_LIMIT)
    try:
        validator = jsonschema_rs.Draft202012Validator(
            {"pattern": f"^(?:{pattern})$"}, pattern_options=options, offline=True
        )
    except (jsonschema_rs.ValidationError, ValueError):
        return None
    has_shorthand = _SHORTHAND.search(pattern) is not None
    return lambda text: None if has_shorthand and not text.isascii() else validator.is_valid(text)
