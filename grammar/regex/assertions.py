"""Derives enforceable patterns from those with look-around, word boundaries or back references.

`^(?=X)(?!Y)Z$` requires a text to match Z and to begin with X but not with Y. It therefore also matches Z alone
and `^X` alone, which an engine can enforce.
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


def list_look_aheads(pattern: str) -> list[str]:
    """Return patterns for the look-aheads behind the `^` of a pattern without alternatives: every match has them all.

    Negative look-aheads are used if they exclude one character.
    """
    if not pattern.startswith("^"):
        return []
    found: list[str] = []
    depth, start, is_leading = 0, 0, True
    for token in _TOKENS.finditer(pattern, 1):
        if depth == 0:
            if token[0] == "|":
                return []
            is_leading &= token["around"] in ("(?=", "(?!")
            start = token.end()
        depth += bool(token["open"] or token["around"]) - bool(token["close"])
        if token["close"] and depth == 0 and is_leading:
            if pattern[token.end() : token.end() + 1] in ("*", "+", "?", "{"):
                is_leading = False
            elif pattern[start - 1] == "=":
                found.append(f"^(?:{pattern[start : token.start()]})")
            elif opposite := exclude_character(pattern[start : token.start()]):
                found.append(rf"^(?:{opposite}[\s\S]*)?$")
    return found


def find_guides(pattern: str) -> list[str]:
    """Return patterns without assertions that every match of this pattern also matches."""
    return list(dict.fromkeys(map(remove_assertions, [pattern, *list_look_aheads(pattern)])))


def exclude_character(pattern: str) -> str | None:
    """Return the class of all other characters, for a pattern of one character or class."""
    if re.fullmatch(r"\[\^?(?:[^\]\\]|\\.)+\]", pattern):
        return "[" + pattern[2:] if pattern.startswith("[^") else "[^" + pattern[1:]
    return f"[^{pattern}]" if re.fullmatch(r"[\w ,:;/<>@#%&=\"'~`!]|\\[dws]", pattern) else None
