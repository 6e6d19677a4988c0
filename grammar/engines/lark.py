"""Lark grammars for llguidance: the part of its dialect that users may write."""

import json
import re
from typing import Any

from ..errors import InvalidGrammar, UnsupportedGrammar

# Strings, patterns and comments; the checks below ignore their content. One that is not closed on its line is read
# once, to where it breaks off, and stays: otherwise each quote in it would be tried again.
_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*+(?P<string>"i?)?|//[^\n]*|/(?:[^/\\\n]|\\.)++(?P<pattern>/[a-z]*)?|#[^\n]*')
# Syntax that would set options, name tokens instead of text, or include a schema without normalisation.
_FORBIDDEN = (
    ("%llguidance", "options of the engine are not the grammar's to set"),
    ("<", "tokens cannot be named; a grammar speaks about text"), ("@", "there is no other grammar to refer to"),
)
_JSON = re.compile(rf"(?:{_QUOTED.pattern})|(?P<json>%json\s*)")
# Attributes after a rule's name control sampling, truncation or capture.
_ATTRIBUTES = re.compile(r"^[^\S\n]*[?!]?\w[\w.-]*\s*\[\s*(\w*)", re.MULTILINE)


def remove_quoted(text: str) -> str:
    return _QUOTED.sub(_blank, text)


def _blank(found: re.Match[str]) -> str:
    is_comment = found[0].startswith(("//", "#"))
    return " " if is_comment or found["string"] or found["pattern"] else found[0]


def take_schemas(text: str) -> tuple[str, list[Any]]:
    """Return a grammar with references @j0, @j1 in place of `%json` and a schema, and the schemas.

    Raises:
        InvalidGrammar: no JSON object follows a `%json`.
    """
    parts, schemas, at = list[str](), list[Any](), 0
    while (found := _JSON.search(text, at)) is not None:
        parts.append(text[at : found.end()])
        at = found.end()
        if found["json"] is None:
            continue
        try:
            schema, at = json.JSONDecoder().raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            raise InvalidGrammar(f"no JSON follows the %json at character {found.start('json')}") from error
        parts[-1] = parts[-1].removesuffix(found["json"]) + f"@j{len(schemas)}"
        schemas.append(schema)
    return "".join([*parts, text[at:]]), schemas


def check_lark(text: str) -> None:
    """Raise GrammarError for a grammar without a start rule or with tokens that are not text."""
    bare = remove_quoted(text)
    if "%json" in bare:
        lark, schemas = take_schemas(text)
        bare = remove_quoted(lark)
        if bare.count("@") == len(schemas):
            bare = bare.replace("@", "")
    attribute = _ATTRIBUTES.search(bare)
    if attribute is not None:
        reason = "attributes of a rule are options of the engine, which are not the grammar's to set"
        raise UnsupportedGrammar("", attribute[1] or "[", reason)
    # `?` and `!` before a rule control its node in a syntax tree; llguidance builds none.
    if not re.search(r"^[^\S\n]*[?!]?start\s*:", bare, re.MULTILINE):
        raise InvalidGrammar("a Lark grammar needs a rule named start")
    for sign, reason in _FORBIDDEN:
        if sign in bare:
            raise UnsupportedGrammar("", sign, reason)


def explain_complaint(message: str) -> str:
    """Return the engine's error with the user's line number; one line of ours precedes the grammar."""
    line = message.strip().split("\n")[0]
    return re.sub(r"^(?:at )?(\d+)\((\d+)\)", lambda m: f"line {int(m[1]) - 1} column {m[2]}", line)
