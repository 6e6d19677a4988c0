"""Quotations: the JSON strings that are parts of a source text, as terminals of llguidance.

A quotation begins and ends at a border of a word, and not with white space; or it is empty. A border is where not
both neighbours are letters, digits, marks or underscores, or where one is of a script that is written without spaces.
Quotations are spelt as json.dumps(ensure_ascii=False) spells them, and hold no control character without a short
escape: those are not written in every schema (exactness.py).
"""

import json
import re
import unicodedata
from bisect import bisect_left
from itertools import accumulate, chain

from ..errors import UnsupportedGrammar
from .keywords import TYPES_OF_KEYWORD
from .node import Node, iterate_nodes
from .property_order import read_types
from .rules import GROUNDED, types_of

# Han, kana, Thai, Lao, Tibetan, Myanmar, Khmer: a border is on either side of each character.
_UNSPACED = re.compile(
    "[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\U00020000-\U0003ffff]"
)
# A character as JSON spells it, and one that is not white space.
_CHARACTER, _VISIBLE = r"(?:[^\\]|\\.)", r"(?:[^\\\s]|\\[^tnrf])"

# Keywords allowed on a grounded string; with any others, no quotation might be valid.
_BESIDE = frozenset([GROUNDED, "type", "minLength", "maxLength", "$ref", "allOf", "anyOf", "oneOf"])
Nodes = frozenset[Node]


class Source:
    """A text to quote from, cut at the borders of words.

    Attributes:
        num_characters: its length.
        parts: its parts between characters that no quotation holds, each as a list of pieces.
    """

    def __init__(self, text: str) -> None:
        kinds = {character: classify(character) for character in set(text)}
        self.num_characters = len(text)
        self.parts: list[list[str]] = [[]]
        is_in_word = False
        for character in text:
            kind = kinds[character]
            if kind == "word" and is_in_word:
                self.parts[-1][-1] += character
            elif kind == "barred":
                self.parts.append([])
            else:
                self.parts[-1].append(character)
            is_in_word = kind == "word"

    def write(self) -> str:
        """Return the rules of the terminal SOURCE: any run of pieces of one part, in JSON's spelling."""
        lines, names = [], []
        for number, pieces in enumerate(filter(None, self.parts)):
            names.append(f"SOURCE{number}")
            spelt = [json.dumps(piece, ensure_ascii=False)[1:-1] for piece in pieces]
            lines.append(f"{names[-1]}: %regex {json.dumps({'substring_chunks': spelt}, ensure_ascii=False)}")
        return "\n".join([f"SOURCE: {' | '.join(names) or '//'}", *lines])

    def has_quotation(self, least: int, most: int | None) -> bool:
        """Return whether some quotation has so many characters."""
        for pieces in self.parts:
            ends = list(accumulate(map(len, pieces)))
            visible = [index for index, piece in enumerate(pieces) if not piece.isspace()]
            lasts = [ends[index] for index in visible]
            for index in visible:
                start = ends[index] - len(pieces[index])
                at = bisect_left(lasts, start + max(least, 1))
                if at < len(lasts) and (most is None or lasts[at] - start <= most):
                    return True
        return not least


def classify(character: str) -> str:
    """Return "word" for what stands inside a word, "barred" for what no quotation holds, "" for all else."""
    if json.dumps(character, ensure_ascii=False).startswith('"\\u') or character == "\x7f":
        return "barred"
    is_letter = character.isalnum() or character == "_" or unicodedata.category(character).startswith("M")
    return "word" if is_letter and not _UNSPACED.match(character) else ""


def write_quotation(least: int, most: int | None) -> str:
    """Return the body of a terminal: the quotations with so many characters, in quotes."""
    parts = ["SOURCE", f"/({_VISIBLE}({_CHARACTER}*{_VISIBLE})?)?/"]
    if least or most is not None:
        parts.append(f"/{_CHARACTER}{{{least},{'' if most is None else most}}}/")
    return rf'"\"" ({" & ".join(parts)}) "\""'


def check_neighbours(nodes: Nodes) -> None:
    """Refuse keywords beside a grounded string for which no quotation might be valid."""
    for node in nodes:
        for keyword in node.keywords:
            if keyword not in _BESIDE and "string" in TYPES_OF_KEYWORD.get(keyword, ("string",)):
                raise UnsupportedGrammar(node.pointer, keyword, f"it may leave no quotation for {GROUNDED}")


def check_ways(ways: list[Nodes]) -> None:
    """Refuse grounded strings in one of several alternatives that take values of the same type."""
    for kind in ("string", "object", "array"):
        fitting = [way for way in ways if all(takes(node, kind) for node in way)]
        for node in iterate_nodes(chain.from_iterable(fitting)) if len(fitting) > 1 else ():
            if GROUNDED in node.keywords:
                raise UnsupportedGrammar(node.pointer, GROUNDED, "an alternative takes the same value without it")


def takes(node: Node, kind: str) -> bool:
    values = node.get("enum", [node.keywords["const"]] if "const" in node.keywords else None)
    return kind in read_types(node) and (values is None or any(kind in types_of(value) for value in values))
