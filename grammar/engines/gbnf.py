"""GBNF as llama.cpp reads it, said in xgrammar's EBNF: empty alternatives and `.` for any character."""

import re
from collections.abc import Iterator

from ..errors import InvalidGrammar

# Strings, classes and comments; the opening of a look-ahead; names, which may hold dots in xgrammar.
_TOKENS = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)
    | (?P<element>"(?:[^"\\\n]|\\.)*" | \[(?:[^\]\\]|\\.)*\])
    | (?P<head>[A-Za-z_.-][\w.-]*\s*::=)
    | (?P<name>[A-Za-z_.-][\w.-]*)
    | (?P<open>\(=?)
    | (?P<sign>.)""",
    re.VERBOSE | re.ASCII | re.DOTALL,
)
ANY_CHARACTER = r"[\u0000-\U0010FFFF]"
EMPTY = ' ""'


def rewrite_gbnf(text: str) -> str:
    """Return the same grammar with "" for each empty alternative and a class for each dot, line by line.

    Raises:
        InvalidGrammar: a rule has no body.
    """
    names = {match["head"].split("::=")[0].rstrip() for match in _TOKENS.finditer(text) if match["head"]}
    parts: list[str] = []
    # Where the empty text goes if no element comes: behind what begins an alternative; None behind an element.
    opened: int | None = None
    bare = ""  # the rule that has nothing at all so far
    for token in _TOKENS.finditer(text):
        if token["space"]:
            parts.append(token[0])
            continue
        if bare and token["head"]:
            break
        bare = token["head"].split("::=")[0].rstrip() if token["head"] else ""
        is_border = token["head"] or token[0] in ("|", ")")
        if is_border and opened is not None:
            parts.insert(opened, EMPTY)
        parts.extend(expand_dots(token[0]) if token["name"] and token[0] not in names else [token[0]])
        is_call = token["open"] and len(parts) > 1 and is_name(parts[-2])
        begins = token["head"] or token[0] == "|" or (token["open"] and not is_call)
        opened = len(parts) if begins else None
    if bare:
        raise InvalidGrammar(f'the rule {bare!r} says nothing; write "" for an empty text')
    if opened is not None:
        parts.insert(opened, EMPTY)
    return "".join(parts)


def expand_dots(name: str) -> Iterator[str]:
    """Yield the parts of what reads as a name but is no rule's: names, and a class for each dot."""
    for part in re.findall(r"\.|[^.]+", name):
        yield f" {ANY_CHARACTER} " if part == "." else part


def is_name(text: str) -> bool:
    """Tell whether a part of a grammar is a name; a bracket right behind one holds the arguments of a macro."""
    return re.fullmatch(r"[A-Za-z_][\w-]*", text) is not None
