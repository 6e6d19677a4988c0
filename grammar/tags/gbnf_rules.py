"""GBNF as rules of Lark with one lexeme for each character, as GBNF means it; or as xgrammar's EBNF."""

import re
import string

from ..errors import InvalidGrammar
from ..regex.text import quote

_TOKENS = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)
    | (?P<head>[\w-]+\s*::=)
    | (?P<name>[\w-]+)
    | (?P<string>"(?:[^"\\\n]|\\.)*")
    | (?P<chars>\[(?:[^\]\\]|\\.)*\])
    | (?P<sign>[|()*+?.]|\{\s*\d{1,9}\s*(?:,\s*(?:\d{1,9}\s*)?)?\})
    | (?P<other>.)""",
    re.VERBOSE | re.ASCII | re.DOTALL,
)
# One character of a literal or a class; an escape may lack digits.
_CHARACTER = re.compile(r"\\(?:x[0-9A-Fa-f]{0,2}|u[0-9A-Fa-f]{0,4}|U[0-9A-Fa-f]{0,8}|.)|.", re.DOTALL)
_HEX = re.compile(r"\\(?:x..|u....|U.{8})")
ANY_CHARACTER = r"[\u0000-\U0010FFFF]"
_LETTERS = {r"\n": "\n", r"\r": "\r", r"\t": "\t"} | {f"\\{sign}": sign for sign in string.punctuation}
_ESCAPES = r"\n, \r, \t, \xHH, \uHHHH, \UHHHHHHHH, and a backslash before a punctuation mark"
_REPEATING = ("*", "+", "?", "{")


def read_gbnf(text: str) -> dict[str, list[tuple[str, str]]]:
    """Return rule -> the kinds and texts of the tokens in its body.

    Raises:
        InvalidGrammar: it is not GBNF, has no rule `root` or refers to a rule that is missing.
    """
    rules: dict[str, list[tuple[str, str]]] = {}
    used: set[str] = {"root"}
    body: list[tuple[str, str]] | None = None
    opened: list[int] = []
    # Where the last item of the body begins, which a sign behind it repeats.
    item: int | None = None
    for token in _TOKENS.finditer(f"{text}\n_ ::="):
        kind, found = token.lastgroup or "", token[0]
        if kind == "space":
            continue
        try:
            if kind == "head":
                if opened:
                    raise InvalidGrammar("a parenthesis is not closed before the rule")
                name = found.split("::=")[0].strip()
                if token.end() > len(text):
                    break
                if name in rules:
                    raise InvalidGrammar(f"the rule {name!r} is written twice")
                body, item = rules.setdefault(name, []), None
                continue
            if body is None or kind == "other":
                raise InvalidGrammar("not GBNF")
            if found.startswith(_REPEATING):
                item = _repeat(body, item, found)
                continue
            if found == ")" and not opened:
                raise InvalidGrammar("a parenthesis was never opened")
            item = opened.pop() if found == ")" else len(body)
            if kind == "name":
                used.add(found)
            elif kind != "sign":
                (list_ranges if kind == "chars" else unescape)(found[1:-1])
            elif found == "(":
                opened.append(len(body))
        except InvalidGrammar as error:
            shown = f" in {found[:20]!r}" if token.end() <= len(text) else ""
            raise InvalidGrammar(f"{error}, at character {min(token.start(), len(text))}{shown}") from None
        body.append((kind, found))
        if found in ("|", "("):
            item = None
    missing = sorted(used - rules.keys())
    if missing:
        raise InvalidGrammar(f"the grammar has no rule {missing[0]!r}")
    return rules


def _repeat(body: list[tuple[str, str]], item: int | None, sign: str) -> int:
    """Repeat the last item of a rule's body, which begins at `item`; returns where it begins now."""
    if item is None:
        raise InvalidGrammar("there is nothing to repeat")
    if sign.startswith("{"):
        least, comma, most = sign[1:-1].replace(" ", "").partition(",")
        least, most = (str(int(part)) if part.strip() else "" for part in (least, most))
        if most and int(most) < int(least):
            raise InvalidGrammar(f"{most} repetitions are fewer than {least}")
        if "0" in (most, "" if comma else least):
            body[item:] = [("string", '""')]
            return item
        sign = f"{{{least}{comma}{most}}}"
    if body[-1][1].startswith(_REPEATING) and body[-1][0] == "sign":
        body[item:] = [("sign", "("), *body[item:], ("sign", ")")]
    body.append(("sign", sign))
    return item


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
    """Return the characters of a literal.

    Raises:
        InvalidGrammar: one of its escapes does not exist.
    """
    return "".join(read_character(found[0]) for found in _CHARACTER.finditer(text))


def read_character(text: str) -> str:
    if not text.startswith("\\"):
        return text
    code = int(text[2:], 16) if _HEX.fullmatch(text) else ord(_LETTERS.get(text, "\ud800"))
    if 0xD800 <= code <= 0xDFFF or code > 0x10FFFF:
        raise InvalidGrammar(f"{text} is no character; GBNF has {_ESCAPES}")
    return chr(code)


def list_ranges(inside: str) -> list[tuple[str, str]]:
    """Return the first and the last character of each range in a class, single characters included.

    Raises:
        InvalidGrammar: a range is reversed, or nothing is in the class.
    """
    found = [each[0] for each in _CHARACTER.finditer(inside.removeprefix("^"))]
    ranges = []
    while found:
        first = last = read_character(found.pop(0))
        if len(found) > 1 and found[0] == "-":
            last, found = read_character(found[1]), found[2:]
        if last < first:
            raise InvalidGrammar(f"the range from {first!r} to {last!r} is reversed")
        ranges.append((first, last))
    if not ranges:
        raise InvalidGrammar("the character class is empty")
    return ranges


def write_class(inside: str) -> str:
    """Return a class of characters as a regular expression writes it, each of them by its number."""
    ranges = (f"\\x{{{ord(first):x}}}-\\x{{{ord(last):x}}}" for first, last in list_ranges(inside))
    return f"[{'^' * inside.startswith('^')}{''.join(ranges)}]"
