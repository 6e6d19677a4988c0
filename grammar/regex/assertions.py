"""Derives enforceable patterns from those with look-around, word boundaries or back references.

`^(?=X)(?!Y)Z$` requires a text to match Z and to begin with X but not with Y. What it matches, `^Z$` matches too,
which an engine can enforce.
"""

import re

# Escapes and classes, whose brackets are literal; repetitions; look-around; other brackets.
# An unclosed class is one token, so that it is scanned once.
_TOKENS = re.compile(
    r"""\\(?P<border>[bB]) | \\(?P<reference>[1-9]\d*|k<\w+>) | \\. | \[\^?\]?(?:[^\]\\]|\\.)*+(?:\]|\\?\Z)
    | (?P<times>(?:[*+?]|\{\d+(?:,\d*)?\})\??) | (?P<around>\(\?<?[=!]) | (?P<open>\() | (?P<close>\)) | .""",
    re.VERBOSE | re.DOTALL,
)
# Replacements for assertions and for back references.
NOTHING, ANYTHING = "(?:)", r"(?:[\s\S]*)"


def remove_assertions(pattern: str) -> str:
    """Return a pattern without look-around and word boundaries, in which back references match any text.

    It matches all that the pattern matches.
    """
    kept: list[str] = []
    depth, removed_at = 0, None
    for token in _TOKENS.finditer(pattern):
        depth += bool(token["open"] or token["around"])
        # Remove a repetition together with its atom; some engines reject repetition of an empty pattern.
        if removed_at is None and not (token["times"] and kept and kept[-1] == NOTHING):
            if token["around"]:
                removed_at = depth
            is_removed = token["around"] or token["border"]
            kept.append(NOTHING if is_removed else ANYTHING if token["reference"] else token[0])
        elif token["close"] and depth == removed_at:
            removed_at = None
        depth -= bool(token["close"])
    return "".join(kept)
