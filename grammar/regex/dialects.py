r"""Patterns of other dialects in Rust's regex syntax, which llguidance and jsonschema-rs read.

There a class may hold other classes, and `&&`, `--` and `~~` combine them. In ECMA-262, in Python and in vLLM's
other backends all these are plain characters. ECMA-262 alone has empty classes, `\cA`, `\0`, pairs of surrogates
and single braces; its white space has U+FEFF and not U+0085, and its dot excludes four line ends.
"""

import re
from functools import lru_cache
from typing import TypeVar

# One escape, with all digits and names that belong to it.
_ESCAPE = (
    r"\\(?:c[A-Za-z]|u[Dd][89ABab][0-9A-Fa-f]{2}\\u[Dd][C-Fc-f][0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|x[0-9A-Fa-f]{2}"
    r"|[ux]\{[0-9A-Fa-f]+\}|[pP]\{[^}]{0,64}\}|[pP][A-Z]|0[0-9]*|.)"
)
_MEMBER = rf"{_ESCAPE}|[^\]\\]"
# An unclosed class is one token, too, so that it is scanned once.
_ECMA = re.compile(
    rf"\[(?P<negated>\^?)(?P<members>(?:{_MEMBER})*+)(?P<end>\]?)|(?P<escape>{_ESCAPE})|(?P<times>\{{\d+(?:,\d*)?\}})"
    r"|(?P<brace>\{)|(?P<dot>\.)",
    re.DOTALL,
)
# A first bracket is a member here, and names such as [:alpha:] are those of POSIX.
_NAMED = r"\[:\^?[a-z]+:\]"
_OTHERS = re.compile(
    rf"{_ESCAPE}|\[(?P<negated>\^?)(?P<members>\]?(?:{_NAMED}|{_MEMBER})*+)(?P<end>\]?)", re.DOTALL
)
# A range, or a member alone: beside a shorthand a hyphen is itself.
_RANGE = re.compile(rf"({_NAMED}|{_ESCAPE}|.)(?:-({_ESCAPE}|.))?", re.DOTALL)
_SHORTHAND = re.compile(r"\\[dDwWsSpP]|\[:")
_PAIR = re.compile(r"\\u([Dd][89ABab]..)\\u([Dd][C-Fc-f]..)")
# ECMA-262 has no inline flags: a pattern with them is Rust's or Python's, and keeps that dot.
_FLAGS = re.compile(r"\(\?[A-Za-z-]+[:)]")

_SPACES = r"\x09-\x0D\x20\xA0\u1680\u2000-\u200A\u2028-\u2029\u202F\u205F\u3000\uFEFF"
_OTHER_THAN_SPACES = (
    r"\x00-\x08\x0E-\x1F\x21-\x9F\xA1-\u167F\u1681-\u1FFF\u200B-\u2027\u202A-\u202E\u2030-\u205E\u2060-\u2FFF"
    r"\u3001-\uFEFE\uFF00-\u{10FFFF}"
)
# ECMA's shorthands, written out for use in a class: other engines take letters and digits beyond ASCII, too.
_SPELT = {
    r"\d": "0-9", r"\D": r"\x00-/:-\u{10FFFF}", r"\w": "0-9A-Z_a-z",
    r"\W": r"\x00-/:-@\[-\^`\{-\u{10FFFF}", r"\s": _SPACES, r"\S": _OTHER_THAN_SPACES,
}
_SPELT_ALONE = {token: f"[^{_SPELT[token.lower()]}]" if token.isupper() else f"[{_SPELT[token]}]" for token in _SPELT}
_ANY = r"\x00-\u{10FFFF}"
_DOT = r"[^\n\r\u2028\u2029]"


T = TypeVar("T")


@lru_cache(maxsize=4096)
def read_ecma(pattern: str) -> str:
    """Return a pattern of ECMA-262 in Rust's syntax. A pattern that is in Rust's syntax already stays what it means."""
    dot = "." if _FLAGS.search(pattern) else _DOT

    def write(found: re.Match[str]) -> str:
        if found["members"]:
            return write_class(found, _SPELT)
        if found["end"]:
            return f"[{'' if found['negated'] else '^'}{_ANY}]"
        if (token := found["escape"]) is not None:
            return _SPELT_ALONE.get(token) or write_escape(token)
        return dot if found["dot"] else r"\{" if found["brace"] else found[0]

    return _ECMA.sub(write, pattern)


def read_names(schemas: dict[str, T]) -> dict[str, T]:
    """Return the schemas of `patternProperties` with their patterns in Rust's syntax, where two may be the same."""
    found: dict[str, T] = {}
    for pattern, schema in schemas.items():
        name = read_ecma(pattern)
        while name in found:
            name = f"(?:{name})"
        found[name] = schema
    return found


def read_classes(pattern: str) -> str:
    """Return a pattern of Python in Rust's syntax, as far as its classes are concerned."""
    return _OTHERS.sub(lambda found: write_class(found, {}) if found["members"] else found[0], pattern)


def write_class(found: re.Match[str], spelt: dict[str, str]) -> str:
    """Return a class in which nothing is nested or combined.

    Args:
        spelt: the members that are written as others.
    """

    def write(found: re.Match[str]) -> str:
        first, last = (spelt.get(token, write_member(token)) if token else "" for token in found.groups(""))
        if not last:
            return first
        is_range = not any(map(_SHORTHAND.match, found.groups()))
        return f"{first}-{last}" if is_range else rf"{first}\-{last}"

    return f"[{found['negated']}{_RANGE.sub(write, found['members'])}]" if found["end"] else found[0]


def write_member(token: str) -> str:
    if token[0] == "\\":
        return r"\x08" if token == r"\b" else write_escape(token)
    return rf"\{token}" if token in "[]&~-" else token


def write_escape(token: str) -> str:
    if token == r"\0":
        return r"\x00"
    if token[1] == "c" and len(token) == 3:
        return rf"\x{ord(token[2]) % 32:02X}"
    if (pair := _PAIR.fullmatch(token)) is not None:
        high, low = (int(half, 16) & 0x3FF for half in pair.groups())
        return rf"\u{{{0x10000 + (high << 10) + low:X}}}"
    # Rust has other meanings for \< and \>, and takes no escapes beyond ASCII.
    return token[1] if token[1] in "<>" or not token[1].isascii() else token
