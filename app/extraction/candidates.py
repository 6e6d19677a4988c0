"""What a text offers for a date or an amount: the only values that a record grounded in it may have.

A text that offers none, or a great many, binds nothing; whole numbers are left alone, because people also write them
as words, stars or lists to be counted.
"""

from __future__ import annotations

import re
from typing import Any

from app.extraction.bounds import walk_narrowable
from app.extraction.dates import find_dates
from app.extraction.grounding import NUMBER, read_number
from app.extraction.prompt import Schema

MAX_CANDIDATES = 64
# Keywords that leave nothing to choose or make a choice of their own.
SETTLED = ("enum", "const", "multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
THOUSANDS = re.compile(r"\s?[kK]\b")


def bind_amounts(schema: Schema, text: str) -> None:
    """Narrow the dates and amounts of a schema, in place, to those that the text offers."""
    dates, amounts = list_dates(text), list_amounts(text)
    for _, subschema in list(walk_narrowable(schema)):
        if any(keyword in subschema for keyword in SETTLED):
            continue
        kind = subschema.get("type")
        if kind == "string" and subschema.get("format") == "date":
            _choose(subschema, dates)
        elif kind == "number":
            _choose(subschema, amounts)


def list_dates(text: str) -> list[Any]:
    """ISO dates in the order of the text; an ambiguous one in both readings."""
    found = sorted(find_dates(text), key=lambda date: date[1])
    return list(dict.fromkeys(iso for iso, _, _ in found))


def list_amounts(text: str) -> list[Any]:
    """Numbers in the order of the text, integers where they are whole; `62k` also stands for 62000."""
    found: list[float] = []
    for match in NUMBER.finditer(text):
        readings = sorted(read_number(match.group()))
        if THOUSANDS.match(text, match.end()):
            readings += [reading * 1000 for reading in readings]
        if re.search(r"(?<![\w.,])[-−]$", text[max(0, match.start() - 2) : match.start()]):
            readings += [-reading for reading in readings]
        found += readings
    return list(dict.fromkeys(int(value) if value == int(value) else value for value in found))


def _choose(subschema: Schema, candidates: list[Any]) -> None:
    if 0 < len(candidates) <= MAX_CANDIDATES:
        subschema.pop("format", None)
        subschema.pop("pattern", None)
        subschema["enum"] = candidates
