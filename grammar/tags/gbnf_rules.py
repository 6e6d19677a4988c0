"""GBNF as rules of Lark with one lexeme for each character, as GBNF means it; or as xgrammar's EBNF."""

import re

from ..errors import InvalidGrammar
from .regular import quote

_TOKENS = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)
    | (?P<head>[A-Za-z_][\w-]*\s*::=)
    | (?P<name>[A-Za-z_][\w-]*)
    | (?P<string>"(?:[^"\\\n]|\\.)*")
    | (?P<chars>\[(?:[^\]\\]|\\.)*\])
    | (?P<sign>[|()*+?.]|\{\d+(?:,\d*)?\})
    | (?P<other>.)""",
    re.VERBOSE | re.ASCII | re.DOTALL,
)
_ESCAPES = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL)
ANY_CHARACTER = r"[\u0000-\U0010FFFF]"
_LETTERS = {"n": "\n", "r": "\r", "t": "\t", "0": "\0"}


def read_gbnf(text: str) -> dict[str, list[tuple[str, str]]]:
    """Return rule -> the kinds and texts of the tokens in its body.

    Raises:
        InvalidGrammar: it is not GBNF, has no rule `root` or refers to a rule that is missing.
    """
    rules: dict[str, list[tuple[str, str]]] = {}
    used: set[str] = {"root"}
    body: list[tuple[str, str]] | None = None
    for token in _TOKENS.finditer(text):
        kind, found = token.lastgroup or "", token[0]
        if kind == "head":
            name = found.split("::=")[0].strip()
            if name in rules:
                raise InvalidGrammar(f"the rule {name!r} is written twice")
            body = rules[name] = []
        elif kind != "space":
            if body is None or kind == "other":
                raise InvalidGrammar(f"not GBNF at character {token.start()}: {found[:20]!r}")
            if kind == "name":
                used.add(found)
            body.append((kind, found))
    missing = sorted(used - rules.keys())
    if missing:
        raise InvalidGrammar(f"the grammar has no rule {missing[0]!r}")
    return rules


def write_gbnf(text: str, prefix: str) -> str:
    """Return a grammar as rules of Lark, of which `{prefix}root` is the start."""
    return "\n".join(
        f"{prefix}{make_name(name)}: {fill_empty([write_token(*token, prefix) for token in body])}"
        for name, body in read_gbnf(text).items()
    )


def write_ebnf(text: str) -> str:
    """Return a grammar as xgrammar reads it: "" for each empty alternative, a class for each dot."""
    rules = []
    for name, body in read_gbnf(text).items():
        if not body:
            raise InvalidGrammar(f'the rule {name!r} says nothing; write "" for an empty text')
        parts = [ANY_CHARACTER if found == "." else found for _, found in body]
        rules.append(f"{name} ::= {fill_empty(parts)}")
    return "\n".join(rules)


def write_token(kind: str, found: str, prefix: str) -> str:
    match kind:
        case "name":
            return prefix + make_name(found)
        case "string":
            letters = " ".join(quote(char) for char in unescape(found[1:-1]))
            return f"({letters})" if letters else '""'
        case "chars":
            return f"/{write_class(found[1:-1])}/"
    return "/(?s:.)/" if found == "." else found


def make_name(name: str) -> str:
    """Return the name of a rule in Lark, where only names in lower case are rules: no two become one."""
    return "".join(char if char.islower() or char.isdigit() else f"_{ord(char):x}_" for char in name)


def fill_empty(body: list[str]) -> str:
    """Return the body of a rule with "" for each empty alternative."""
    parts: list[str] = []
    for part in [*body, "|"]:
        if part in ("|", ")") and (not parts or parts[-1] in ("|", "(")):
            parts.append('""')
        parts.append(part)
    return " ".join(parts[:-1])


def unescape(text: str) -> str:

    def read(found: re.Match[str]) -> str:
        code = found[1] or found[2] or found[3]
        return chr(int(code, 16)) if code else _LETTERS.get(found[4], found[4])

    return _ESCAPES.sub(read, text)


def write_class(inside: str) -> str:
    """Return a class of characters as a regular expression writes it, each of them by its number."""
    is_negated = inside.startswith("^")
    parts: list[str] = []
    for found in re.finditer(r"\\(?:x..|u....|U.{8}|.)|.", inside[is_negated:], re.DOTALL):
        is_range = found[0] == "-" and parts and found.end() < len(inside) - is_negated
        parts.append("-" if is_range else f"\\x{{{ord(unescape(found[0])):x}}}")
    return f"[{'^' if is_negated else ''}{''.join(parts)}]"
