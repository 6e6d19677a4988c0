"""Dates, amounts and integers in a text: the only values that a record grounded in it may have.

A list that limits a record has to be complete. So one is made only where every number, or every date, of the text is
understood; otherwise the type stays open, and a note says why. People also write integers as words, as stars, or as
things to be counted: besides the integers in digits a record may have number words, rows of stars, and every count up
to the largest number of list items or of commas in a sentence. At most the first 256 places of a schema are limited.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from app.extraction.bounds import LOWER, UPPER, list_types, walk_narrowable
from app.extraction.dates import Date, find_unread_date, read_dates
from app.extraction.number_words import INTEGER_WORDS
from app.extraction.numbers import find_numbers
from app.extraction.prompt import Schema
from grammar import SchemaValidator

MAX_CANDIDATES = 64
# For each of them the whole schema is read again.
MAX_PLACES = 256
MAX_SCALE = 100  # between the ends of a scale, such as one to five stars, which a text rarely has in figures
UNREAD_AMOUNT = re.compile(
    r"\b(?:hundred|thousand|lakh|crore|[mb]illion)s?\b"
    r"|\b(?:one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w{3,5}teen|\w{3,4}ty)"
    r"(?:[\s-]+\w+){0,2}"
    r"[\s-]+(?:dollars?|euros?|pounds?|cents?|pence|quid|bucks|francs?|crowns?|yen|per\s?cent)\b"
    r"|\b\w{0,24}(?:hundert|tausend|[mb]illi?[oa]rd|millón|milh|тысяч|миллион)\w{0,8}\b|\b(?:mille|cien|ciento|cem|cento|mila)\b"
    r"|[〇零一二三四五六七八九十百千万萬億亿兆壱弐参]{2,}|[一二三四五六七八九十百千][円元圆圓块塊원]|[½-¾⅐-ⅿⅰ-↋①-⓿]",
    re.IGNORECASE,
)
# Digits with a scale, a unit or a form that changes their value.
UNREAD_FORM = re.compile(
    r"\d[^\S\n]?(?:tys|tis|mill\w*|mil\.|mili[oaó]\w*|miliard\w*|(?-i:MM|[TkMm]\s?€)|[TkM](?:EUR|USD|CHF|GBP)|grand"
    r"|dozens?|dutzend|douzaines?|docenas?|dozzin[ae]|d[uú]zias?|dozijn|tuzin\w*|cents?|centimes?|c[eé]nt[ei]si?mos?|centavos?"
    r"|centesimi|pence|grosz\w*|öre|øre|haléř\w*|kopek\w*|bps?|basis\spoints?|basispunkte?n?|pb|v\.\s?[HT]\.)(?!\w)"
    r"|\d(?-i:p)(?!\w)|\d[€$£¥]\d|\d-\d{1,2}/\d|\d\s\d{1,2}/100|\d:\d\d\s?kr\b|\d\s\.\s?\d"
    r"|\d(?:\s?°\s?[CF]?|\s\w+)?\s(?:below\szero|unter\snull)\b|\b(?!a\s)\w+[\s-]dozen\b|\band\sa\shalf\b|\bhalf\san?\b"
    r"|\bpoint\s(?:zero|one|two|three|four|five|six|seven|eight|nine)\b",
    re.IGNORECASE,
)
# Beside a number it may be negative: a bracket, a sign apart from it, or a word that takes it away.
SIGN_BEFORE = re.compile(
    r"(?:[(\[<]|(?<![\w-])[−–~-]|\./\.|\b(?:minus|negative|less|loss\sof|discount|credit|refund|abzgl|abzüglich|moins|menos"
    r"|meno|minder|remise|rabatt|skonto|sconto|descuento|desconto|korting|rabat))[^\w\n]{0,3}(?:[^\W\d_]{1,7}\W{1,3})?"
    r"[^\w\n]{0,3}\Z",
    re.IGNORECASE,
)
SIGN_BEHIND = re.compile(
    r"[^\w\n]{0,2}(?:[^\W\d_]{1,7}\W{0,2})?(?:[)\]>]|[−–-](?!\s?\w)|(?:negative|credit|debit|soll|haben|od|db|dr|cr)\b)",
    re.IGNORECASE,
)
# Words that are no amount in most sentences.
NO_AMOUNTS = frozenset(
    ["a", "an", "one", "once", "single", "both", "no", "none", "due", "sei", "sept", "dos", "elf", "twice"]
)
# Compounds of words, words that mean no definite number, and number words of languages that are not read here.
UNREAD_INTEGER = re.compile(
    r"\b(?:twen|thir|for|fif|six|seven|eigh|nine)ty[\s-](?:one|two|three|four|five|six|seven|eight|nine)\b"
    r"|\b(?:hundred|thousand|half a dozen|dozens|several|score)\b"
    r"|\b(?:dreizehn|vierzehn|fünfzehn|sechzehn|siebzehn|achtzehn|neunzehn|(?:\w{0,12}und)?(?:zwan|drei|vier|fünf|sech|sieb|acht|"
    r"neun)[zß]ig|trece|catorce|quince|dieci\w+|veint\w+|treinta|cuarenta|cincuenta|sesenta|setenta|ochenta|noventa|treize|"
    r"quatorze|quinze|seize|vingts?|trente|quarante|cinquante|soixante|septante|huitante|nonante|tredici|quattordici|"
    r"quindici|sedici|vent[io]\w*|trenta|quaranta|cinquanta|sessanta|settanta|ottanta|novanta|treze|catorze|dezesseis|"
    r"dezoito|vinte|trinta|quarenta|cinquenta|sessenta|oitenta|dertien|veertien|vijftien|zestien|\w{0,12}(?:twin|der|veer|"
    r"vijf|zes|zeven|tach|negen)tig)\b"
    r"|\b(?:trzynaście|czternaście|piętnaście|szesnaście|siedemnaście|osiemnaście|dziewiętnaście|dwadzieścia|trzydzieści"
    r"|\w{3,10}dziesiąt|sto|tysiąc\w*)\b",
    re.IGNORECASE,
)
# Words in letters other than Latin ones.
UNREAD_LETTERS = re.compile(
    r"[\u0370-\u1dff\u2c00-\u2dff\u3040-\u9fff\ua000-\uabff\uac00-\ud7ff\uf900-\ufaff]",
    re.IGNORECASE,
)
STARS = re.compile(r"[★⭐*]+")
LIST_ITEM = re.compile(r"^[^\S\n]*(?:[-*•]|\d+[.)])\s", re.MULTILINE)
MAX_COUNT = 12
CONTEXT_CHARS = 24  # searched before a number for a sign


@dataclass(frozen=True, slots=True)
class _Values:
    """The values of one type that a text offers; `open_why` says why the list is not complete."""

    values: list[Any]
    open_why: str = ""


def bind_amounts(schema: Schema, text: str) -> tuple[bool, list[str]]:
    """Narrow the dates and amounts of a schema, in place, to those that the text offers and the schema accepts.

    Returns whether any were narrowed, and notes on those that stay open.
    """
    reader = _Reader(text)
    given = json.loads(json.dumps(schema))
    notes: dict[str, None] = {}
    places = [
        (pointer, subschema, "dates" if kinds == {"string"} else "numbers" if kinds == {"number"} else "integers")
        for pointer, subschema in walk_narrowable(schema)
        if not _is_choice(subschema)
        and (
            (kinds := list_types(subschema) - {"null"}) in ({"number"}, {"integer"})
            or (kinds == {"string"} and subschema.get("format") == "date")
        )
    ]
    is_bound = False
    offered = {kind: reader.read(kind) for kind in dict.fromkeys(kind for *_, kind in places)}
    for pointer, subschema, kind in places[:MAX_PLACES]:
        found = offered[kind]
        if found.open_why:
            notes[f"{kind} are not limited to those of the text: {found.open_why}"] = None
        elif accepted := _accepted(given, pointer, found.values):
            _choose(subschema, accepted)
            is_bound = True
        else:
            notes[f"{pointer or '/'} is not limited to the {kind} of the text: the schema accepts none of them"] = None
    if len(places) > MAX_PLACES:
        notes[f"only the first {MAX_PLACES} dates and numbers of the schema are limited to those of the text"] = None
    return is_bound, list(notes)


def _is_choice(subschema: Schema) -> bool:
    """Return whether the schema lists the values or gives the two ends of a scale."""
    low, high = (
        [end for key in side if isinstance(end := subschema.get(key), int | float) and not isinstance(end, bool)]
        for side in (LOWER, UPPER)
    )
    is_scale = bool(low) and bool(high) and min(high) - max(low) <= MAX_SCALE
    return is_scale or "enum" in subschema or "const" in subschema


class _Reader:
    """Lists the values of a text by their type."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.dates = read_dates(text)

    def read(self, kind: str) -> _Values:
        """Return the values, none where the text may have others, none at all or very many."""
        readers = {"dates": self.list_dates, "numbers": lambda: self.amounts, "integers": self.list_integers}
        values, unread = readers[kind]()
        if unread:
            return _Values([], f"{unread!r} may be one and is not understood for sure")
        if not values:
            return _Values([], "it has none")
        if len(values) > MAX_CANDIDATES:
            return _Values(values, f"it has more than {MAX_CANDIDATES}")
        return _Values(values)

    def list_dates(self) -> tuple[list[Any], str]:
        found = dict.fromkeys(spelling for date in self.dates for spelling in date.spellings)
        return list(found), find_unread_date(self.text, self.dates)

    @cached_property
    def amounts(self) -> tuple[list[Any], str]:
        patterns = (UNREAD_AMOUNT, UNREAD_FORM, UNREAD_INTEGER)
        unread = next(filter(None, (_first(pattern, self.text) for pattern in patterns)), "")
        found: dict[int | float, None] = {}
        last = len(self.text)
        spans = iter([*((date.start, date.end) for date in self.dates if date.readings), (last, last)])
        start, end = next(spans)
        for number in sorted(find_numbers(self.text), key=lambda each: each.start):
            while end <= number.start:
                start, end = next(spans)
            is_in_date = start <= number.start and number.end <= end
            if not number.is_sure and not is_in_date:
                unread = unread or self.text[number.start : number.end + 8].split("\n")[0].strip()
            found |= dict.fromkeys(value for reading in number.readings for value in (abs(reading), reading))
            before = SIGN_BEFORE.search(self.text, max(0, number.start - CONTEXT_CHARS), number.start)
            if not is_in_date and (before is not None or SIGN_BEHIND.match(self.text, number.end) is not None):
                found |= dict.fromkeys(-abs(reading) for reading in number.readings if reading)
        found |= dict.fromkeys(_list_parts(self.dates))
        words = re.findall(r"[^\W\d_]+", self.text.lower())
        values = [INTEGER_WORDS[word] for word in words if word in INTEGER_WORDS and word not in NO_AMOUNTS]
        if found:
            found |= dict.fromkeys(values)
        if found and ("minus" in words or "negative" in words):
            found |= dict.fromkeys(-value for value in values)
        return list(found), unread

    def list_integers(self) -> tuple[list[Any], str]:
        amounts, unread = self.amounts
        found = [value for value in amounts if isinstance(value, int)]
        words = [word.lower() for word in re.findall(r"[^\W\d_]+", self.text)]
        found += [INTEGER_WORDS[word] for word in words if word in INTEGER_WORDS]
        found += [len(stars[0]) for stars in STARS.finditer(self.text)]
        if found:
            parts = re.split(r"[.!?\n]", self.text)
            num_items = max(len(LIST_ITEM.findall(self.text)), *(part.count(",") + 2 for part in parts))
            found += range(min(num_items, MAX_COUNT) + 1)
        return list(dict.fromkeys(found)), unread or _first(UNREAD_LETTERS, self.text)


def _list_parts(dates: Iterable[Date]) -> Iterator[int]:
    """Yield the years, months and days of dates: `March` is 3."""
    return (part for date in dates for reading in date.readings for part in reading if part > 0)


def _first(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text)
    return found.group() if found is not None else ""


def _accepted(schema: Schema, pointer: str, candidates: list[Any]) -> list[Any]:
    """The candidates that fit everything that the schema says of the value at this place."""
    validator = SchemaValidator(schema, pointer)
    return [candidate for candidate in candidates if validator.is_valid(candidate)]


def _choose(subschema: Schema, candidates: list[Any]) -> None:
    # Every candidate has them.
    subschema.pop("format", None)
    subschema.pop("pattern", None)
    subschema["enum"] = [*candidates, None] if "null" in list_types(subschema) else candidates
