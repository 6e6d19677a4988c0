"""The one reader of dates: every date of a text in every reading, and whatever may be a date and is not understood.

A text is a row of words and numbers with short gaps. Three neighbours make a date: `2026-03-12`, `12/03/2026`,
`12 de marzo de 2026`, `March 12th, 2026`, `2026年3月12日`. The names of months are those of the Unicode CLDR.
"""

from __future__ import annotations

import datetime
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

from babel.dates import get_month_names

# The languages that people write most, and some of their neighbours in Europe.
LANGUAGES = (
    *("en", "zh", "hi", "es", "ar", "fr", "bn", "pt", "ru", "ur", "id", "de", "ja", "mr", "te", "tr", "ta", "vi", "ko"),
    *("it", "fa", "pl", "nl", "uk", "gu", "sv", "nb", "da", "fi", "cs", "sk", "ro", "hu", "el", "bg", "ca", "th", "he"),
)
# Words inside a date: endings of its numbers, and what joins day, month and year.
FILLERS = frozenset(
    [*("st", "nd", "rd", "th", "er", "ere", "re", "o", "a", "of", "the", "d", "de", "del", "do", "di", "den", "der"),
     *("day", "ngay", "thang", "thg", "nam", "г", "ค", "ศ", "年", "月", "日", "년", "월", "일")]
)
SEPARATORS = "./．／·_‐‑–−－-"
RANGES = "~～〜&+"
GAP = re.compile(rf"[\s\u200e\u200f\u0970\u05f3,،，、'’°{RANGES}{SEPARATORS}]{{0,6}}")
MAX_TEXT_CHARS = 64  # of one date in any spelling
MAX_GAP = 16  # characters between two parts of a date
YEAR_FIRST = {("年", "月"), ("년", "월")}
NUMERIC_GAPS = YEAR_FIRST | {(mark, mark) for mark in SEPARATORS}
NUMERIC_GAPS |= {("thang", "nam"), ("thg", "nam"), ("/", "nam")}
NUMERIC_GAPS |= {(word, mark) for word in ("thang", "thg") for mark in ("", ",")}
# A dot ends a day and a month, and a slash may stand free: `12. 3. 2026`, `12 / 3 / 2026`.
SPACED = "./．／,年月년월"
CENTURIES = (2000, 1900)
# Words between two days of one month: `12 and 13 March`, `du 12 au 15 mars`.
JOINS = frozenset(
    [*("and", "to", "or", "until", "till", "through", "thru", "und", "bis", "oder", "et", "au", "ou", "y", "e", "o"),
     *("al", "ed", "i", "do", "lub", "en", "tot", "t", "m", "tm", "ate", "och", "till", "og", "til", "ja", "a", "az"),
     *("και", "и")]
)
# Spellings of months that the Unicode CLDR lacks or has for one country only.
OTHER_MONTHS = {"janner": 1, "feber": 2, "maerz": 3, "mrz": 3}
# A day without its month, as in `delivered on the 12th`, and a date of three numbers with spaces.
LONE_DAY = re.compile(
    r"\b(?:on|by|until|till|before|after|from|to)\s+the\s+\d{1,2}(?:st|nd|rd|th)\b"
    r"(?!\s+(?:of|floor|edition|century|anniversary|street|avenue|birthday|place|grade|day|time|item|row|page)\b)"
    r"|(?<!\d)(?<!\d )(?:(?:19|20)\d\d \d\d \d\d|\d\d \d\d (?:19|20)\d\d)(?! ?\d)",
    re.IGNORECASE,
)
# Years of other calendars look like these.
USUAL_YEARS = range(1500, 2400)
ERAS = {"令和": 2018, "平成": 1988, "昭和": 1925, "大正": 1911}  # the year before the first one of each
CJK_DATE = re.compile(r"[〇零一二三四五六七八九十]{1,4}[年月日]|\d[年月]|\d{4}-?W\d")


@dataclass(frozen=True, slots=True)
class Date:
    """A date at [start, end) of a text.

    Attributes:
        readings: (year, month, day), the usual one first; day 0 stands for a whole month. Empty: not understood.
        is_sure: whether one of the readings is right: neither the year nor its century is missing.
    """

    readings: tuple[tuple[int, int, int], ...]
    start: int
    end: int
    is_sure: bool = True

    @property
    def spellings(self) -> list[str]:
        """The readings as YYYY-MM-DD or YYYY-MM."""
        return [f"{year:04}-{month:02}" + (f"-{day:02}" if day else "") for year, month, day in self.readings]


@dataclass(frozen=True, slots=True)
class _Part:
    """A word, a month or a number of at most four digits; `gap` is what joins it to the part before it."""

    kind: Literal["number", "month", "word"]
    value: int
    start: int
    end: int
    gap: str

    @property
    def num_digits(self) -> int:
        return self.end - self.start if self.kind == "number" else 0

    @property
    def is_short(self) -> bool:
        """Return whether it may be a day or the number of a month."""
        return 0 < self.num_digits <= 2

    @property
    def is_year(self) -> bool:
        return self.num_digits == 4


def find_dates(text: str) -> Iterator[tuple[str, int, int]]:
    """Every (ISO date, start, end) of the text, in all readings."""
    for date in read_dates(text):
        yield from (
            (spelling, date.start, date.end) for spelling in date.spellings if len(spelling) == len("YYYY-MM-DD")
        )


def read_dates(text: str) -> list[Date]:
    """Every date of the text in its order, and what may be one."""
    return [date for chain in _list_chains(text) for date in _read_chain(text, chain)]


def read_date(text: str) -> list[str]:
    """Return the readings of a text that is one date as a whole, as YYYY-MM-DD or YYYY-MM; none of any other."""
    dates = read_dates(text) if len(text) <= MAX_TEXT_CHARS else []
    return [spelling for date in dates if (date.start, date.end) == (0, len(text)) for spelling in date.spellings]


def list_marks(text: str) -> str:
    """Return the combining marks of the text, sorted. None of them has a meaning in a regex."""
    return "" if text.isascii() else "".join(sorted(char for char in set(text) if _is_mark(char)))


def fold_word(word: str) -> str:
    """Return a word without case and without the accents of European letters, which people leave out."""
    if word.isascii():
        return word.lower()
    parts = unicodedata.normalize("NFKD", word.casefold())
    plain = "".join(char for char in parts if not "\u0300" <= char <= "\u036f")
    return unicodedata.normalize("NFKC", plain).replace("ı", "i")


@cache
def month_names() -> dict[str, int]:
    """The number of a month by its folded name or abbreviation, in all languages; made once, in 0.1 s."""
    names: dict[str, int] = {}
    for language in LANGUAGES:
        for context in ("format", "stand-alone"):
            for width in ("wide", "abbreviated"):
                for month, name in get_month_names(width, context, language).items():
                    plain = fold_word(name).strip(".\u0970\u05f3")
                    if not any(char.isdigit() or char in " ." for char in plain):
                        names.setdefault(plain, month)
                        if language == "he":  # with "in" before it
                            names.setdefault(f"ב{plain}", month)
    return OTHER_MONTHS | names


def _is_mark(char: str) -> bool:
    """Return whether it is an accent, a vowel sign, a Korean vowel or final, or a voicing mark of narrow kana."""
    if "\ufe00" <= char <= "\ufe0f":
        return False  # a variation selector changes only how a character is drawn
    return unicodedata.category(char)[0] == "M" or "\u1160" <= char <= "\u11ff" or "\uff9e" <= char <= "\uff9f"


def _list_chains(text: str) -> Iterator[list[_Part]]:
    """Yield the rows of parts that have nothing but short gaps and fillers between them."""
    months = month_names()
    kinds: dict[str, int | None] = {}  # months and, as None, fillers; 0 for other words
    chain: list[_Part] = []
    gap, last = "", 0
    for token in re.finditer(rf"\d+|[^\W\d_](?:[^\W\d_]|[{list_marks(text)}\u0300])*", text):
        start, end = token.span()
        between = text[last:start] if start - last <= MAX_GAP else "\n\n"
        last = end
        if GAP.fullmatch(between) is None or between.count("\n") > 1 or len(gap) > MAX_GAP:
            yield chain
            chain, gap = [], ""
        gap += between
        word = token.group()
        if word[0].isdecimal():
            if len(word) <= 4:
                chain.append(_Part("number", int(word), start, end, gap))
            else:
                yield chain
                chain = []
                if len(word) == 8:
                    yield [_Part("number", int(word), start, end, "")]
            gap = ""
            continue
        if word not in kinds:
            folded = fold_word(word)
            kinds[word] = None if folded in FILLERS else months.get(folded, 0)
        month = kinds[word]
        if month is None:
            gap += fold_word(word)
        else:
            chain.append(_Part("month" if month else "word", month, start, end, gap))
            gap = ""
    yield chain


def _read_chain(text: str, chain: list[_Part]) -> Iterator[Date]:
    """Yield the dates of a row: first those with a full year, then what is left between them."""
    if len(chain) == 1 and chain[0].num_digits == 8:
        yield from _read_compact(chain[0])
        return
    found: list[Date] = []
    at = begin = 0
    while at < len(chain):
        date = _read_full(text, chain, at)
        if date is None:
            at += 1
            continue
        first, days = _read_days(text, chain, begin, at, date)
        found += [*_read_rest(text, chain[begin:first]), *days, date]
        at = begin = at + 3
        if (last := _read_end(chain, at, date)) is not None:
            found.append(last)
            at = begin = at + 1
    yield from found
    yield from _read_rest(text, chain[begin:])


def _read_days(text: str, chain: list[_Part], begin: int, at: int, date: Date) -> tuple[int, list[Date]]:
    """Return the days before the one of a date that share its month, and where in the row they begin."""
    days: list[Date] = []
    if not chain[at].is_short or chain[at + 1].kind != "month" or not date.readings:
        return at, days
    year, month, _ = date.readings[0]
    first = at
    while first > begin:
        place, marks = first - 1, _squeeze(chain[first].gap)
        is_joined = any(mark in marks for mark in f"{RANGES}{SEPARATORS},،،、" if mark not in ".．") or marks in JOINS
        if chain[place].kind == "word" and fold_word(text[chain[place].start : chain[place].end]) in JOINS:
            is_joined, place = True, place - 1
            if place > begin and text[chain[place].start : chain[place].end] == "t":  # t/m
                place -= 1
        if place < begin or not is_joined or not chain[place].is_short:
            break
        if readings := _keep_real([(year, month, chain[place].value)]):
            days.insert(0, Date(readings, chain[place].start, date.end, date.is_sure))
        first = place
    return first, days


def _read_end(chain: list[_Part], at: int, date: Date) -> Date | None:
    """Return the last day of a range that names it alone: 2026-03-12/15."""
    if at >= len(chain) or not chain[at - 3].is_year or not chain[at].is_short or not date.readings:
        return None
    mark = chain[at].gap.lstrip("日일")
    year, month, _ = date.readings[0]
    readings = _keep_real([(year, month, chain[at].value)]) if mark and mark in f"{RANGES}{SEPARATORS}" else ()
    return Date(readings, chain[at - 3].start, chain[at].end, date.is_sure) if readings else None


def _read_full(text: str, chain: list[_Part], at: int) -> Date | None:
    """Return the date with a year of four digits whose first part stands at `at`."""
    if len(chain) < at + 3:
        return None
    a, b, c = chain[at : at + 3]
    marks = (_squeeze(b.gap), _squeeze(c.gap))
    if b.kind == "month" and a.is_short and c.is_year:
        orders = [(c, b, a)]
    elif b.kind == "month" and a.is_year and c.is_short:
        orders = [(a, b, c)]
    elif a.kind == "month" and b.is_short and c.is_year:
        orders = [(c, a, b)]
    elif marks not in NUMERIC_GAPS or not _is_tight(b.gap, c.gap):
        return None
    elif a.is_year and b.is_short and c.is_short:
        orders = [(a, b, c)]
    elif a.is_short and b.is_short and c.is_year:
        orders = [(c, b, a), (c, a, b)] if marks[0] in SEPARATORS and marks[1] in SEPARATORS else [(c, b, a)]
    else:
        return None
    # Part of a longer number with the same separator.
    beside = [_squeeze(part.gap) for part in (*chain[at : at + 1], *chain[at + 3 : at + 4])][0 if at else 1 :]
    is_part = marks[0] == marks[1] and marks[0] in SEPARATORS and marks[0] in beside and marks[0] != ""
    readings = _keep_real((year.value, month.value, day.value) for year, month, day in orders)
    is_sure = bool(readings) and not is_part and all(year in USUAL_YEARS for year, _, _ in readings)
    return Date(readings, a.start, c.end + (text[c.end : c.end + 1] in ("日", "일")), is_sure)


def _read_rest(text: str, parts: list[_Part]) -> Iterator[Date]:
    """Yield what may be a date among parts without a full one: short years, missing years, unknown words."""
    at = 0
    while at < len(parts):
        size = 3
        date = _read_short(text, parts[at : at + 3])
        if date is None:
            size, date = 2, _read_pair(text, parts[at : at + 2])
        if date is None:
            size = 1
        else:
            yield date
        at += size


def _read_short(text: str, parts: list[_Part]) -> Date | None:
    """Return a date with a year of two digits, in both centuries, or one with a word that may be a month."""
    if len(parts) < 3:
        return None
    a, b, c = parts
    era = text[max(0, a.start - 2) : a.start]
    if era in ERAS and a.is_short and b.is_short and c.is_short and (_squeeze(b.gap), _squeeze(c.gap)) in YEAR_FIRST:
        readings = _keep_real([(ERAS[era] + a.value, b.value, c.value)])
        return Date(readings, a.start - 2, c.end + (text[c.end : c.end + 1] == "日"), bool(readings))
    if (b.kind == "word" and a.is_short and c.is_year) or (
        a.kind == "word" and b.is_short and c.is_year and "," in c.gap
    ):
        return Date((), a.start, c.end, False) if c.value in USUAL_YEARS else None
    if re.match(r"[:h.]\d", text[c.end : c.end + 2]):
        return None
    if b.kind == "month" and a.is_short and c.num_digits == 2:
        orders = [(c, b, a)]
    elif a.kind == "month" and b.is_short and c.num_digits == 2 and ("'" in c.gap or "’" in c.gap):
        orders = [(c, a, b)]
    elif (
        a.is_short and b.is_short and c.is_short and (_squeeze(b.gap), _squeeze(c.gap)) in NUMERIC_GAPS
        and _is_tight(b.gap, c.gap)
    ):
        starts_year = (_squeeze(b.gap), _squeeze(c.gap)) in YEAR_FIRST
        orders = [(c, b, a), (c, a, b)] if c.num_digits == 2 and not starts_year else []
        orders += [(a, b, c)] if a.num_digits == 2 else []
    else:
        return None
    readings = _keep_real(
        (century + year.value, month.value, day.value) for century in CENTURIES for year, month, day in orders
    )
    # Digits such as 32-10-00 are a number of another kind; a year before 年 is one of an era.
    return Date(readings, a.start, c.end, False) if readings or b.kind == "month" or "年" in b.gap else None


def _read_pair(text: str, parts: list[_Part]) -> Date | None:
    """Return a month of a year, or a day of a month without a year."""
    if len(parts) < 2:
        return None
    a, b = parts
    mark = _squeeze(b.gap)
    if a.kind == "month" and b.is_year:
        return Date(((b.value, a.value, 0),), a.start, b.end, False)
    if "month" in (a.kind, b.kind) and (a.is_short or b.is_short):
        return Date((), a.start, b.end, False)
    has_year = (a.is_year and b.is_short) or (a.is_short and b.is_year)
    if has_year and mark in ("/", "-", ".", "年", "년") and _is_tight(b.gap):
        year, month = (a, b) if a.is_year else (b, a)
        return Date(((year.value, month.value, 0),), a.start, b.end, False) if 1 <= month.value <= 12 else None
    is_day = a.is_short and b.is_short and min(a.value, b.value) in range(1, 13) and max(a.value, b.value) <= 31
    ends_dot = re.match(r"\.(?!\d)", text[b.end : b.end + 2]) is not None
    if is_day and ((mark == "/" and _is_tight(b.gap)) or (mark == "." and ends_dot) or mark in ("月", "월")):
        return Date((), a.start, b.end, False)
    return None


def _read_compact(part: _Part) -> Iterator[Date]:
    """Yield the date that eight digits are: 20260312, and perhaps 12032026."""
    first, last = divmod(part.value, 10_000)
    (front, back), (month, day) = divmod(first, 100), divmod(last, 100)
    if first in range(1900, 2100) and (readings := _keep_real([(first, month, day)])):
        yield Date(readings, part.start, part.end)
    elif last in range(1900, 2100) and (readings := _keep_real([(last, back, front), (last, front, back)])):
        yield Date(readings, part.start, part.end, False)


def _squeeze(gap: str) -> str:
    return re.sub(r"[\s\u200e\u200f]+", "", gap)


def _is_tight(*gaps: str) -> bool:
    """Return whether spaces stand only where a date of numbers has them."""
    return all(gap == _squeeze(gap) or _squeeze(gap) in SPACED or len(_squeeze(gap)) > 1 for gap in gaps)


def _keep_real(dates: Iterator[tuple[int, int, int]] | list[tuple[int, int, int]]) -> tuple[tuple[int, int, int], ...]:
    """Return the dates that exist, each once."""
    real = []
    for year, month, day in dates:
        try:
            datetime.date(year, month, day)
        except ValueError:
            continue
        real.append((year, month, day))
    return tuple(dict.fromkeys(real))


def find_unread_date(text: str, dates: list[Date]) -> str:
    """Return the first part of a text that may be a date and is not understood for sure; "" if there is none."""
    unsure = next((date for date in dates if not date.is_sure), None)
    if unsure is not None:
        return text[unsure.start : unsure.end]
    spans = iter([*((date.start, date.end) for date in dates), (len(text), len(text))])
    start, end = next(spans)
    for match in CJK_DATE.finditer(text):
        while end <= match.start():
            start, end = next(spans)
        if match.end() <= start:
            return match.group()
    for match in LONE_DAY.finditer(text):
        if not any(date.start < match.end() <= date.end for date in dates):
            return match.group()
    return ""
