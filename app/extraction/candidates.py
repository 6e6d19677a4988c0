"""Dates, amounts and integers in a text: the only values that a record grounded in it may have.

Values are not restricted if the text has no candidate or very many, or a date or an amount in a form that is not read
here (`05.03.24`, `1.2 million`), which may be the right value. People also write integers as words, as stars, or as
things to be counted: besides the integers in digits a record may have number words, rows of stars, and every count up
to the largest number of list items or of commas in a sentence. At most the first 256 places of a schema are restricted.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from app.extraction.bounds import walk_narrowable
from app.extraction.dates import find_dates
from app.extraction.grounding import NUMBER_WORDS, find_numbers
from app.extraction.prompt import Schema
from grammar import SchemaValidator

MAX_CANDIDATES = 64
# For each of them the whole schema is read again.
MAX_PLACES = 256
# Keywords that leave nothing to choose or make a choice of their own.
SETTLED = ("enum", "const", "multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
# The year in two digits could be of either century.
UNREAD_DATE = re.compile(
    r"(?<![\d.])\d{1,2}([./-])\d{1,2}\1\d{2}(?![\d.]\d|\d)"
    r"|\b\d{1,2}[.\s-]+[A-Za-z]{3,9}\.?[\s'’-]+\d{2}\b(?!\d)"
)
UNREAD_AMOUNT = re.compile(
    r"\d\s?(?:mn|mio|bn)\b|(?:[$€£]|\b(?-i:[A-Z]{3}))\s?[\d.,]+\s?m\b|\b(?:hundred|thousand|lakh|crore|[mb]illion)s?\b"
    r"|\b(?:one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w{3,5}teen|\w{3,4}ty)"
    r"(?:[\s-]+\w+){0,2}"
    r"[\s-]+(?:dollars?|euros?|pounds?|cents?|pence|quid|bucks|francs?|crowns?|yen|per\s?cent)\b",
    re.IGNORECASE,
)
INTEGER_WORDS = {word: value for value, word in enumerate(NUMBER_WORDS)} | {
    "thirteen": 13, "fourteen": 14, "fifteen": 15, "sixteen": 16, "seventeen": 17, "eighteen": 18, "nineteen": 19,
    "twenty": 20, "thirty": 30, "forty": 40, "fifty": 50, "sixty": 60, "seventy": 70, "eighty": 80, "ninety": 90,
    "a": 1, "an": 1, "once": 1, "single": 1, "both": 2, "pair": 2, "twice": 2, "dozen": 12, "no": 0, "none": 0,
}  # fmt: skip
# Compounds of words, and words that mean no definite number.
VAGUE_COUNT = re.compile(
    r"\b(?:twen|thir|for|fif|six|seven|eigh|nine)ty[\s-](?:one|two|three|four|five|six|seven|eight|nine)\b"
    r"|\b(?:hundred|thousand|half a dozen|dozens|several|score)\b",
    re.IGNORECASE,
)
STARS = re.compile(r"[★⭐*]+")
LIST_ITEM = re.compile(r"^\s*(?:[-*•]|\d+[.)])\s", re.MULTILINE)
MAX_COUNT = 12
THOUSANDS = re.compile(r"\s?[kK]\b")


def bind_amounts(schema: Schema, text: str) -> None:
    """Narrow the dates and amounts of a schema, in place, to those that the text offers and the schema accepts."""
    dates, amounts, integers = list_dates(text), list_amounts(text), list_integers(text)
    given = json.loads(json.dumps(schema))
    places = [
        (pointer, subschema, dates if kinds == {"string"} else amounts if kinds == {"number"} else integers)
        for pointer, subschema in walk_narrowable(schema)
        if not any(keyword in subschema for keyword in SETTLED)
        and (
            (kinds := _list_types(subschema) - {"null"}) in ({"number"}, {"integer"})
            or (kinds == {"string"} and subschema.get("format") == "date")
        )
    ]
    for pointer, subschema, candidates in places[:MAX_PLACES]:
        _choose(subschema, _accepted(given, pointer, candidates))


def list_dates(text: str) -> list[Any]:
    """ISO dates in the order of the text, an ambiguous one in both readings; none when one could not be read."""
    if UNREAD_DATE.search(text):
        return []
    found = sorted(find_dates(text), key=lambda date: date[1])
    return list(dict.fromkeys(iso for iso, _, _ in found))


def list_amounts(text: str) -> list[Any]:
    """Numbers in the order of the text, integers where they are whole; an empty list when an amount is in words.

    `62k` also stands for 62000.
    """
    if UNREAD_AMOUNT.search(text):
        return []
    found: list[float] = []
    for meanings, is_negative, (_, end) in find_numbers(text):
        readings = sorted(meanings)
        if THOUSANDS.match(text, end):
            readings += [reading * 1000 for reading in readings]
        if is_negative:
            readings += [-reading for reading in readings]
        found += readings
    # A key of hundreds of digits is no amount: as a float it is infinite.
    finite = filter(math.isfinite, found)
    return list(dict.fromkeys(int(value) if value.is_integer() else value for value in finite))


def list_integers(text: str) -> list[Any]:
    """Integers in the order of the text, then those in words and stars, then counts; empty when one was not read."""
    if VAGUE_COUNT.search(text):
        return []
    found = [value for value in list_amounts(text) if isinstance(value, int)]
    if not found and UNREAD_AMOUNT.search(text):
        return []
    words = [word.lower() for word in re.findall(r"[^\W\d_]+", text)]
    found += [INTEGER_WORDS[word] for word in words if word in INTEGER_WORDS]
    found += [len(stars[0]) for stars in STARS.finditer(text)]
    if not found:
        return []
    num_items = max(
        len(LIST_ITEM.findall(text)), *(part.count(",") + 2 for part in re.split(r"[.!?\n]", text))
    )
    return list(dict.fromkeys([*found, *range(min(num_items, MAX_COUNT) + 1)]))


def _accepted(schema: Schema, pointer: str, candidates: list[Any]) -> list[Any]:
    """The candidates that fit everything that the schema says of the value at this place."""
    if not 0 < len(candidates) <= MAX_CANDIDATES:
        return candidates
    validator = SchemaValidator(schema, pointer)
    return [candidate for candidate in candidates if validator.is_valid(candidate)]


def _choose(subschema: Schema, candidates: list[Any]) -> None:
    if 0 < len(candidates) <= MAX_CANDIDATES:
        # Every candidate has them.
        subschema.pop("format", None)
        subschema.pop("pattern", None)
        subschema["enum"] = [*candidates, None] if "null" in _list_types(subschema) else candidates


def _list_types(subschema: Schema) -> set[str]:
    named = subschema.get("type", [])
    return {named} if isinstance(named, str) else set(named)
