"""Regular expressions as text: escapes and complaints, assertions, sets of characters, and matching in linear time.

Python's `re` goes back and tries again: `(a+)+b` against forty letters keeps it busy for hours, and nothing can stop
it. jsonschema-rs brings an engine that never goes back. It reads the shorthands as JSON Schema does, over ASCII alone.
"""

import json
import re
from collections.abc import Callable, Sequence
from functools import lru_cache

import jsonschema_rs
from llguidance import regex_to_lark

_ENCODER = json.JSONEncoder(ensure_ascii=False)  # `json.dumps` would make one for each text
_ESCAPES = {ord(sign): f"\\{sign}" for sign in r"\.+*?()|[]{}^$#&~-"}


def choices_to_regex(choices: Sequence[str]) -> str:
    return "(?:" + "|".join(escape(choice) for choice in choices) + ")"


def escape(text: str) -> str:
    """Escape a text for Rust's regex syntax, which takes fewer escapes of letters than Python's."""
    return text.translate(_ESCAPES)


def ends_in_escape(pattern: str) -> bool:
    """Return whether a pattern ends with a backslash that escapes nothing. llguidance would read on behind its end."""
    return (len(pattern) - len(pattern.rstrip("\\"))) % 2 == 1


def explain_pattern(message: str, has_places: bool) -> str:
    """Return what is wrong with a pattern, and with `has_places` where, out of the complaint of Rust's regex parser.

    The parser writes the pattern, carets below what it does not like, and `error: ` with the reason; around that
    stands the grammar in which the engine wrapped the pattern.
    """
    reason = re.search(r"^error: (.+)$", message, re.MULTILINE)
    if reason is None:
        return message.strip().split("\n")[0]
    carets = re.search(r"^ {4}( *)\^+$", message, re.MULTILINE)
    if carets is None or not has_places:
        return reason[1]
    return f"{reason[1]}, at character {len(carets[1]) + 1}"


def write_terminal(pattern: str) -> str:
    """Return a pattern in Rust's syntax as a terminal of Lark."""
    return f"/{regex_to_lark(pattern)}/"


def quote(text: str) -> str:
    """Return a fixed text as Lark writes it."""
    return _ENCODER.encode(text)


# Escapes and classes, whose brackets are literal; repetitions; look-around; other brackets.
# An unclosed class is one token, so that it is scanned once.
_PARTS = re.compile(
    r"""\\(?P<border>[bB]) | \\(?P<reference>[1-9]\d*|k<\w+>) | \\. | \[\^?\]?(?:[^\]\\]|\\.)*+(?:\]|\\?\Z)
    | (?P<times>(?:[*+?]|\{\d+(?:,\d*)?\})\??) | (?P<around>\(\?<?[=!]) | (?P<open>\() | (?P<close>\)) | .""",
    re.VERBOSE | re.DOTALL,
)
# Replacements for assertions and for back references.
NOTHING, ANYTHING = "(?:)", r"(?:[\s\S]*)"


def remove_assertions(pattern: str) -> str:
    """Return a pattern without look-around and word boundaries, in which back references match any text.

    It matches all that the pattern matches: `^(?=X)(?!Y)Z$` demands Z of a text, beside what X and Y say.
    """
    kept: list[str] = []
    depth, removed_at = 0, None
    for token in _PARTS.finditer(pattern):
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


_LOOK_AHEAD = re.compile(r"\(\?([=!])((?:[^()\[\\]|\\.|\[\^?\]?(?:[^\]\\]|\\.)*+\])*+)\)(?![*+?{])")
_ONE_CHARACTER = re.compile(r"\[(?!\^)((?:[^\]\\]|\\.)++)\]|([\w ,:;/<>@#%&=\"'~`!]|\\[dws])")


def list_look_aheads(pattern: str) -> list[str]:
    """Return patterns for the look-aheads behind the `^` of a pattern without alternatives: every match has them all.

    Negative ones are used if they exclude one character.
    """
    found: list[str] = []
    end = 1 if pattern.startswith("^") and "|" not in pattern else len(pattern)
    while ahead := _LOOK_AHEAD.match(pattern, end):
        end = ahead.end()
        if ahead[1] == "=":
            found.append(f"^(?:{ahead[2]})")
        elif one := _ONE_CHARACTER.fullmatch(ahead[2]):
            found.append(rf"^(?:[^{one[1] or one[2]}][\s\S]*)?$")
    return found


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


_TOKEN = re.compile(
    r"\\(?:x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|[xu]\{[0-9A-Fa-f]{1,6}\}|[pP](?:\{\^?[\w=:-]+\}|[A-Z])|.)"
    r"|\[(?:[^\]\\]|\\.)*\]|.",
    re.DOTALL,
)
_CODE = re.compile(r"\\[xu]\{?([0-9A-Fa-f]{2,6})")
_BEYOND_ASCII = "\x80ÿ\u2028\uffff\U0001f600"


class UnknownSyntax(Exception):
    """The pattern holds something this reader does not know."""


def list_sets(pattern: str) -> list[tuple[int, frozenset[int]]]:
    """Return (offset, code points) of each class, escape and character.

    The code points are those of ASCII, and some beyond where there are any; shorthands take all of them.

    Raises:
        UnknownSyntax: a class is not understood.
    """
    return [(token.start(), find_members(token[0])) for token in _TOKEN.finditer(pattern)]


@lru_cache(maxsize=4096)
def find_members(token: str) -> frozenset[int]:
    """Return the code points of one class, escape or character."""
    if token[0] not in "[\\":
        return frozenset([ord(token)])
    is_class = token[0] == "["
    if is_class and len(token) == 1:
        raise UnknownSyntax
    known = None if token == "\\" else read_pattern(token)
    if known is None and (is_class or token == r"\a"):  # A bell to llguidance, and nothing to ECMA-262.
        raise UnknownSyntax
    if known is None:  # A back reference is not a set of characters.
        return frozenset()
    written = {*_BEYOND_ASCII, *(chr(int(code, 16)) for code in _CODE.findall(token) if int(code, 16) < 0x110000)}
    probes = {*map(chr, range(0x80)), *(char for char in {*written, *token} if not "\ud800" <= char <= "\udfff")}
    return frozenset(ord(char) for char in probes if known(char) is not False)
