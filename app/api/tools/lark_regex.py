"""A Lark grammar without recursion as one regular expression, which the string of a call can follow."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

MAX_CHARS = 50_000  # of the grammar and of the expression
TOKEN = re.compile(
    r"(?P<skip>[ \t\r\n]+|//[^\n]*|#[^\n]*)"
    r'|(?P<string>"(?:[^"\\\n]|\\.)*+")(?P<ignores_case>i?)'
    r"|/(?P<regex>(?:[^/\\\n]|\\.)++)/(?P<flags>[a-z]*)"
    r"|(?P<define>^[?!]?\w+(?:\.\d+)?[ \t]*:)|(?P<name>\w+)|(?P<sign>->|\.\.|[|()\[\]?*+~])",
    re.MULTILINE,
)
DIRECTIVE = re.compile(r"^[ \t]*%(.*)$", re.MULTILINE)
IMPORT = re.compile(r"import\s+common\.(\w+)\s*(?:->\s*(\w+)\s*)?")
COMMON = {
    "LF": r"\n", "CR": r"\r", "NEWLINE": r"(?:\r?\n)+", "WS": r"[ \t\f\r\n]+", "WS_INLINE": r"[ \t]+",
    "DIGIT": r"[0-9]", "HEXDIGIT": r"[0-9a-fA-F]", "INT": r"[0-9]+", "SIGNED_INT": r"[+\-]?[0-9]+",
    "LETTER": r"[a-zA-Z]", "WORD": r"[a-zA-Z]+", "CNAME": r"[_a-zA-Z][_a-zA-Z0-9]*",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
}
SPECIAL = re.compile(r"[\\^$.|?*+()\[\]{}/-]")

Token = tuple[str, str]  # "regex", "name" or "sign", and its text


class NotRegular(ValueError):
    """A grammar that is recursive, or has what is not supported here; the message says what."""


def to_regex(text: str) -> str:
    """Return the expression of the texts that a grammar allows."""
    if len(text) > MAX_CHARS:
        raise NotRegular(f"more than {MAX_CHARS} characters")
    known: dict[str, str | None] = {}  # None while it is being written
    for directive in DIRECTIVE.findall(text):
        found = IMPORT.fullmatch(directive.partition("//")[0])
        if found is None or found[1] not in COMMON:
            raise NotRegular(f"%{directive[:40]}")
        known[found[2] or found[1]] = COMMON[found[1]]
    try:
        return _Writer(_read_rules(DIRECTIVE.sub("", text)), known).write("start")
    except RecursionError:
        raise NotRegular("too many levels") from None


def _read_rules(text: str) -> dict[str, list[Token]]:
    rules: dict[str, list[Token]] = {}
    body: list[Token] = []
    place = 0
    while place < len(text):
        found = TOKEN.match(text, place)
        if found is None:
            raise NotRegular(f"{text[place : place + 20]!r}")
        place = found.end()
        if (head := found["define"]) is not None:
            body = rules.setdefault(re.split(r"[.:]", head.lstrip("?!"))[0].strip(), [])
        elif found["string"] is not None:
            body.append(("regex", _quote(found["string"], found["ignores_case"])))
        elif found["regex"] is not None:
            if found["flags"].strip("s"):
                raise NotRegular(f"the flags {found['flags'][:20]!r}")
            body.append(("regex", f"(?{found['flags'][:1]}:{found['regex']})".replace(r"\/", "/")))
        elif found["skip"] is None:
            kind = "name" if found["name"] is not None else "sign"
            body.append((kind, found[0]))
    return rules


def _quote(string: str, ignores_case: str) -> str:
    try:
        text = json.loads(string)
    except ValueError:
        raise NotRegular(f"the string {string[:40]}") from None
    if ignores_case:
        raise NotRegular("strings that ignore the case")
    return f"(?:{SPECIAL.sub(lambda char: chr(92) + char[0], text)})"


class _Writer:
    def __init__(self, rules: dict[str, list[Token]], known: dict[str, str | None]) -> None:
        self._rules = rules
        self._known = known
        self._num_chars = 0

    def write(self, name: str) -> str:
        """Return the expression of a rule."""
        if name not in self._known:
            if name not in self._rules:
                raise NotRegular(f"there is no rule {name[:40]}")
            self._known[name] = None
            tokens = iter([*self._rules[name], ("sign", "")])
            self._known[name], end = self._write_choice(tokens)
            if end:
                raise NotRegular(f"{end} in the rule {name[:40]}")
        found = self._known[name]
        if found is None:
            raise NotRegular(f"the rule {name[:40]} is recursive")
        self._num_chars += len(found)
        if self._num_chars > MAX_CHARS:
            raise NotRegular(f"an expression of more than {MAX_CHARS} characters")
        return found

    def _write_choice(self, tokens: Iterator[Token]) -> tuple[str, str]:
        """Return the expression up to the sign that ends it, and the sign."""
        choices: list[list[str]] = [[]]
        for kind, text in tokens:
            last = choices[-1]
            if kind == "regex":
                last.append(text)
            elif kind == "name":
                last.append(f"(?:{self.write(text)})")
            elif text in ("(", "["):
                inner, end = self._write_choice(tokens)
                if end != {"(": ")", "[": "]"}[text]:
                    raise NotRegular(f"{text} is not closed")
                last.append(inner + "?" * (text == "["))
            elif text == "|":
                choices.append([])
            elif text in ("?", "*", "+") and last:
                last[-1] = f"(?:{last[-1]}{text})"
            elif text == "->":
                next(tokens)  # a name in the parse tree, which is not built here
            elif text in (")", "]", ""):
                return f"(?:{'|'.join(map(''.join, choices))})", text
            else:
                raise NotRegular(text)
        raise NotRegular("its end")
