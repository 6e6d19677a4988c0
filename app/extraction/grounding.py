"""Evidence: the range of the source text that shows a value of the record.

exact        the source has the value's characters
normalised   it differs in case, spaces, quotes or dashes, or is the same date, time or number in another spelling
none         the source does not show it; the model concluded it or made it up
"""

from __future__ import annotations

import datetime
import re
import unicodedata
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from app.extraction.dates import Date, list_marks, read_date, read_dates
from app.extraction.json_spans import Leaf, Path, Scalar
from app.extraction.number_words import find_number_words
from app.extraction.numbers import find_numbers, read_number

Match = Literal["exact", "normalised", "none"]

# A line break counts as this many characters of distance between two values.
LINE_DISTANCE = 100
# A value that stands very often in the text is looked for in its next places only.
MAX_SPANS = 256
MAX_NEAR = 16  # values of an item that pull the next one
CLOCK = re.compile(
    r"(?:\b|(?<=\dT))(?P<hour>\d{1,2})(?:(?P<mark>[:.]|\s?h\s?)(?P<minute>\d{2})(?::(?P<second>\d{2}))?)?"
    r"(?P<half>\s*[ap]\.?\s?m\b|[ap]\b)?(?:\b|(?=Z))(?!\d)",
    re.IGNORECASE,
)
OFFSET = re.compile(
    r"(?:[.,]\d{1,9})?\s?(?:(?P<utc>Z|UTC|GMT)\b|(?P<sign>[+−-])(?P<hours>\d{2}):?(?P<minutes>\d{2})\b)"
)
# A whole hour, or one with its minutes in words: `10 Uhr`, `22時30分`.
SPOKEN_CLOCK = re.compile(
    r"(?<![\d.,:])(?:(?P<half>午前|午後|上午|下午|오전|오후)\s?)?(?P<hour>\d{1,2})\s?"
    r"(?:(?:時|时|點|点|시)\s?(?:(?P<minute>\d{1,2})\s?[分분])?|(?P<uhr>Uhr)\b(?:\s(?P<late>\d{2})(?![\d.,]))?)",
    re.IGNORECASE,
)
CLOCK_DISTANCE = 24  # characters between a date and its time of day
# "7.30" may be a time or a price. The text around it decides, see BEFORE_CLOCK, BEHIND_CLOCK and BEHIND_PRICE.
DOTTED = r"\d{1,2}\.\d{2}"
BEFORE_CLOCK = re.compile(
    r"\b(?:at|from|until|till|to|by|before|after|between|and|time|starts?|ends?|opens?|closes?|doors|um|ab|von|bis|gegen)"
    rf"(?::\s*|\s+)(?:(?:about|around|ca\.?)\s+)?(?:{DOTTED}\s?[-–]\s?)?\Z",
    re.IGNORECASE,
)
BEHIND_CLOCK = re.compile(rf"(?:\s?[-–]\s?{DOTTED})?\s?(?:[ap]\.?\s?m|h|hrs?|hours|o'clock|uhr)\b", re.IGNORECASE)
BEHIND_PRICE = re.compile(
    r"\s?(?:[€$£¥%]|(?:eur|usd|gbp|chf|euros?|dollars?|pounds?|percent|each|per)\b)", re.IGNORECASE
)
CLOCK_CHARS = 40  # characters searched before a time
# Shorter values match whole words only ("Tea" is not in "Steam"), except in scripts without spaces between words.
MIN_INNER_CHARS = 4
UNSPACED = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]{2}")
# A number of an account or a telephone with as many characters and digits may be divided in any way.
MIN_CODE_CHARS, MIN_CODE_DIGITS, MAX_CODE_CHARS = 6, 4, 40
CODE = re.compile(r"\+?[^\W_]+(?:[ ./()-]{1,3}[^\W_]+)*")
# Atomic, so that a text of many zeros in brackets takes linear time.
DIVIDED = r"(?>(?:[ ./-]{0,3}\(0\))?[ ./()-]{0,3})"
# A word that is divided at the end of a line.
HYPHENATED = r"(?P<divided>(?<=[^\W\d_])[-‐][ \t]*\n[ \t]*(?=[^\W\d_]))"
SAME_CHARACTERS = str.maketrans({"İ": "i", "’": "'", "‘": "'", "“": '"', "”": '"', "–": "-", "—": "-", "‑": "-"})


@dataclass(frozen=True, slots=True)
class Evidence:
    """The half-open range [start, end) of the source that shows a value; empty when there is none."""

    match: Match
    start: int = 0
    end: int = 0
    quote: str = ""


NO_EVIDENCE = Evidence("none")
Span = tuple[int, int]


def find_evidence(leaves: Sequence[Leaf], source: str) -> dict[str, Evidence]:
    """Return the evidence of every string and number by JSON pointer. true, false, null and "" are left out.

    An empty source, of a document that is an image, is no evidence for or against a value.
    """
    if not source.strip():
        return {}
    finder = _Finder(source)
    known: dict[tuple[type, Scalar], tuple[Match, list[Span]]] = {}
    found: dict[str, Evidence] = {}
    lists: dict[Path, _ListReader] = {}
    several: dict[str, tuple[Match, list[Span]]] = {}  # of values outside lists that stand in several places
    for leaf in leaves:
        if isinstance(leaf.value, bool) or leaf.value is None or leaf.value == "":
            continue
        key = (type(leaf.value), leaf.value)
        if key not in known:
            known[key] = finder.find(leaf.value)
        match, spans = known[key]
        places = [at for at, step in enumerate(leaf.path) if isinstance(step, int)]
        if not spans:
            found[leaf.pointer] = NO_EVIDENCE
            continue
        if not places and len(spans) > 1:
            several[leaf.pointer] = match, spans
        if places:
            # Use the outermost list that contains the value: its items are usually in the order of the source.
            reader = lists.get(leaf.path[: places[0]]) or _ListReader(finder)
            lists[leaf.path[: places[0]]] = reader
            start, end = reader.pick(leaf.path[: places[0] + 1], leaf.path[: places[-1] + 1], spans)
        else:
            start, end = spans[0]
        found[leaf.pointer] = Evidence(match, start, end, source[start:end])
    _part(found, several, source)
    return found


def _part(found: dict[str, Evidence], several: dict[str, tuple[Match, list[Span]]], source: str) -> None:
    """Move each value outside lists that shares its place with another one to the next place that is free."""
    taken = bytearray(len(source))
    for pointer, each in found.items():
        if pointer not in several:
            taken[each.start : each.end] = b"\1" * (each.end - each.start)
    for pointer, (match, spans) in several.items():
        start, end = next((span for span in spans[:MAX_SPANS] if taken.find(1, *span) < 0), spans[0])
        found[pointer] = Evidence(match, start, end, source[start:end])
        taken[start:end] = b"\1" * (end - start)


class _ListReader:
    """Assigns the values of one list to source spans; each span is evidence for one value only.

    The first value of an item is searched after the previous item. Its other values take the span nearest to those
    already found, on either side, preferably in the same line. A value with no free span shares one.
    """

    def __init__(self, finder: _Finder) -> None:
        self.breaks = finder.breaks
        self.taken = bytearray(len(finder.source))  # 1 for each character that earlier items use
        self.before: Span = (0, 0)  # smallest start and largest end of the previous item
        self.item: Path = ()
        self.own: set[Span] = set()  # spans of this item
        self.inner: Path = ()
        # The last span of the previous item of the innermost list, then the spans of the current one.
        self.near: list[Span] = []

    def pick(self, item: Path, inner: Path, spans: list[Span]) -> Span:
        """Return the span of one value. `spans` is sorted and not empty."""
        if item != self.item:
            self.end_item()
            self.item = item
        if inner != self.inner:
            self.inner, self.near = inner, self.near[-1:]
        start, end = self.before
        at = bisect_left(spans, (start, 0))
        near = spans[at : at + MAX_SPANS] + spans[: min(at, MAX_SPANS)]
        free = [span for span in near if span not in self.own and self.taken.find(1, *span) < 0]
        if not free:
            return near[0]
        ahead = [span for span in free if span[0] >= start] or free
        if self.near:
            chosen = self.nearest(ahead)
        else:
            chosen = next((span for span in ahead if span[0] >= end), ahead[0])
        self.own.add(chosen)
        self.near.append(chosen)
        return chosen

    def end_item(self) -> None:
        for start, end in self.own:
            self.taken[start:end] = b"\1" * (end - start)
        if self.own:
            self.before = (min(start for start, _ in self.own), max(end for _, end in self.own))
        self.own, self.near = set(), []

    def nearest(self, spans: list[Span]) -> Span:
        """Return the span closest to the spans in `near`."""
        closest: list[tuple[int, Span]] = []
        for start, end in self.near[-MAX_NEAR:]:
            at = bisect_left(spans, (start, 0))
            closest += [(self.distance(end, span[0]), span) for span in spans[at : at + 1]]
            closest += [(self.distance(span[1], start), span) for span in spans[max(at - 1, 0) : at]]
        # At equal distance the later span wins.
        return min(closest, key=lambda each: (each[0], -each[1][0]))[1]

    def distance(self, start: int, end: int) -> int:
        num_lines = bisect_left(self.breaks, end) - bisect_left(self.breaks, start)
        return max(end - start, 0) + LINE_DISTANCE * max(num_lines, 0)


class _Finder:
    """Finds values in the source, of which all dates, times and numbers are read once."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.breaks = [match.start() for match in re.finditer("\n", source)]
        self.folded, self.origin = _fold(source)
        self.marks, self.folded_marks = list_marks(source), list_marks(self.folded)
        self.dates: dict[str, list[Span]] = {}
        self.clocks: dict[str, list[Span]] = {}
        self.moments: dict[datetime.datetime, list[Span]] = {}
        self.numbers: dict[int | float, list[Span]] = {}
        dates = read_dates(source)
        self.days = sorted((date.start, date.end) for date in dates)
        clocks = sorted(find_clocks(source), key=lambda clock: clock[1])
        for date in dates:
            for spelling in date.spellings:
                self.dates.setdefault(spelling, []).append((date.start, date.end))
        for clock, span in clocks:
            self.clocks.setdefault(clock, []).append(span)
            self.clocks.setdefault(clock[:5], []).append(span)
        for moment, span in _list_moments(source, dates, clocks):
            self.moments.setdefault(moment, []).append(span)
        for number in find_numbers(source):
            for value in number.readings:
                self.numbers.setdefault(value, []).append((number.start, number.end))
        # The month of a date in words, or the century of a short year.
        for date in dates:
            for value in {part for reading in date.readings for part in reading}:
                self.numbers.setdefault(value, []).append((date.start, date.end))
        for value, start, end in find_number_words(source):
            self.numbers.setdefault(value, []).append((start, end))

    def find(self, value: str | float) -> tuple[Match, list[Span]]:
        """Return every span that shows the value, sorted, and how well they match."""
        if isinstance(value, str):
            spans = _occurrences(self.source, value, self.marks)
            if spans:
                return "exact", spans
            spans = self._folded_occurrences(value) or self._other_spellings(value) or self._divided_codes(value)
            return "normalised", sorted(spans)
        spans = sorted(dict.fromkeys(self.numbers.get(value, ())))
        written = repr(value)
        exact = [span for span in spans if self.source[slice(*span)] == written and self._stands_alone(span)]
        # 10.00 is a likelier place of the number 10 than 10 May 2026.
        outside = [span for span in exact if not self._is_in_date(span)]
        if exact and not outside and any(not self._is_in_date(span) for span in spans):
            return "normalised", [span for span in spans if not self._is_in_date(span)]
        return ("exact", outside or exact) if exact else ("normalised", spans)

    def _is_in_date(self, span: Span) -> bool:
        at = bisect_left(self.days, (span[1], 0)) - 1
        return at >= 0 and self.days[at][1] > span[0]

    def _stands_alone(self, span: Span) -> bool:
        beside = self.source[span[0] - 1 : span[0]] + self.source[span[1] : span[1] + 1]
        return not any(char.isalnum() or char == "_" for char in beside)

    def _folded_occurrences(self, value: str) -> list[Span]:
        folded, _ = _fold(value)
        spans = _occurrences(self.folded, folded, self.folded_marks) if folded else []
        return [(self.origin[start][0], self.origin[end - 1][1]) for start, end in spans]

    def _divided_codes(self, value: str) -> list[Span]:
        """Return where the text has a code that is divided otherwise, or a unit with or without its space."""
        folded, _ = _fold(value)
        plain = re.sub(r"\(0\)|[\W_]", "", folded)
        if CODE.fullmatch(folded) is None or len(plain) > MAX_CODE_CHARS:
            return []
        if len(plain) >= MIN_CODE_CHARS and sum(map(str.isdecimal, plain)) >= MIN_CODE_DIGITS:
            pattern = DIVIDED.join(plain)
        elif (unit := re.fullmatch(r"(\d+(?:[.,]\d+)?) ?([^\W\d_]+)", folded)) is not None:
            pattern = rf"{re.escape(unit[1])} ?{unit[2]}"
        else:
            return []
        found = re.finditer(rf"(?<![^\W_])(?<!\d[.,]){pattern}(?![^\W_])", self.folded)
        # 1234.56 is an amount, not the code 123456.
        codes = (match.span() for match in found if "." not in match.group() or not read_number(match.group()))
        return [(self.origin[start][0], self.origin[end - 1][1]) for start, end in codes]

    def _other_spellings(self, value: str) -> list[Span]:
        """Return where the text has the value's date, time of day or number in another spelling."""
        if not any(char.isdecimal() for char in value):
            return []
        moment = _read_moment(value)
        if moment is not None:
            found = self.moments.get(moment) or self.moments.get(moment.replace(tzinfo=None))
            is_day = moment.time() == datetime.time()
            return found or (self.dates.get(moment.date().isoformat(), []) if is_day else [])
        if clock := re.fullmatch(r"(\d{2}:\d{2})(?::(\d{2}))?(?:Z|[+-]\d{2}:?\d{2})?", value):
            return self.clocks.get(clock[1] if clock[2] in (None, "00") else f"{clock[1]}:{clock[2]}", [])
        spans = [span for spelling in read_date(value) for span in self.dates.get(spelling, ())]
        if not spans and not value.isdecimal():
            # Digits alone may be an identifier, of which every zero counts.
            spans = [span for number in read_number(value) for span in self.numbers.get(number, ())]
        return list(dict.fromkeys(spans))


def _list_moments(
    source: str, dates: Sequence[Date], clocks: Sequence[tuple[str, Span]]
) -> Iterator[tuple[datetime.datetime, Span]]:
    """Yield each date with the time of day beside it; with its offset from UTC where the text has one."""
    starts = [start for _, (start, _) in clocks]
    for date in dates:
        at = bisect_left(starts, date.end)
        for clock, (start, end) in clocks[max(at - 1, 0) : at + 1]:
            if max(start - date.end, date.start - end) > CLOCK_DISTANCE or (start < date.end and date.start < end):
                continue
            offset, span = OFFSET.match(source, end), (min(start, date.start), max(end, date.end))
            for spelling in date.spellings:
                local = _read_moment(f"{spelling}T{clock}")
                if local is None:
                    continue
                if offset is None or offset["utc"]:
                    yield local, span
                if offset is not None:
                    minutes = 0 if offset["utc"] else int(offset["hours"]) * 60 + int(offset["minutes"])
                    delta = datetime.timedelta(minutes=-minutes if offset["sign"] in ("-", "−") else minutes)
                    if abs(delta) < datetime.timedelta(days=1):
                        yield local.replace(tzinfo=datetime.timezone(delta)), span


def _read_moment(value: str) -> datetime.datetime | None:
    """Return the date and time of day that a text in ISO 8601 is; None for any other."""
    if not re.match(r"\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}", value, re.ASCII):
        return None
    try:
        return datetime.datetime.fromisoformat(value)
    except ValueError:
        return None


def _occurrences(text: str, value: str, marks: str) -> list[Span]:
    """Return where the value occurs as whole words; for longer values, otherwise inside words.

    Args:
        marks: combining marks of the text. A character followed by a mark is a different character.
    """

    def continues(char: str) -> bool:
        return char != "" and (char.isalnum() or char == "_" or char in marks)

    starts_word, ends_word = continues(value[0]), continues(value[-1])
    whole: list[Span] = []
    inner: list[Span] = []
    at = text.find(value)
    while at >= 0:
        end = at + len(value)
        after = text[end : end + 1]
        is_whole = False
        if not after or after not in marks:
            is_whole = not (starts_word and continues(text[at - 1 : at])) and not (ends_word and continues(after))
            (whole if is_whole else inner).append((at, end))
        at = text.find(value, end if is_whole else at + 1)
    if whole or (len(value) < MIN_INNER_CHARS and not UNSPACED.search(value)):
        return whole
    return inner


def _fold(text: str) -> tuple[str, list[Span]]:
    """Normalise case, width, composition, spacing and typography; also return each character's span in `text`."""
    folded: list[str] = []
    origin: list[Span] = []
    marks = list_marks(text)
    for match in re.finditer(rf"{HYPHENATED}|(?s:.)[{marks}]*" if marks else f"{HYPHENATED}|(?s:.)", text):
        sign = match.group()
        if not sign.isascii() and unicodedata.category(sign[0]) == "Cf":
            continue  # a soft hyphen and its kin are not shown
        if match["divided"]:
            piece = "" if text[match.end()].islower() else "-"
        elif sign.isspace():
            piece = "" if not folded or folded[-1] == " " else " "
        else:
            piece = unicodedata.normalize("NFKC", sign).translate(SAME_CHARACTERS).casefold()
        folded += piece
        origin += [match.span()] * len(piece)
    while folded and folded[-1] == " ":
        folded.pop()
        origin.pop()
    return "".join(folded), origin


def find_clocks(source: str) -> Iterator[tuple[str, Span]]:
    """Yield each time of day as HH:MM with its span."""
    for match in CLOCK.finditer(source):
        clock = _read_clock(match)
        if clock is not None:
            yield f"{clock[0]:02}:{clock[1]:02}" + (f":{match['second']}" if match["second"] else ""), match.span()
    for match in SPOKEN_CLOCK.finditer(source):
        hour, minute = int(match["hour"]), int(match["minute"] or match["late"] or 0)
        if match["half"]:
            hour = hour % 12 + (12 if match["half"] in ("午後", "下午", "오후") else 0)
        if hour < 24 and minute < 60:
            yield f"{hour:02}:{minute:02}", match.span()
    yield from (("12:00", match.span()) for match in re.finditer(r"\bnoon\b", source, re.IGNORECASE))


def _read_clock(match: re.Match[str]) -> tuple[int, int] | None:
    """Return hour and minute, None if nothing shows that the digits are a time of day."""
    hour, minute = int(match["hour"]), int(match["minute"] or 0)
    if half := (match["half"] or "").strip()[:1].lower():
        return hour % 12 + (12 if half == "p" else 0), minute
    is_clock = match["minute"] is not None and (match["mark"] != "." or _stands_for_time(match))
    return (hour, minute) if is_clock else None


def _stands_for_time(match: re.Match[str]) -> bool:
    """Return whether the text around digits with a dot shows that they are a time of day."""
    source, (start, end) = match.string, match.span()
    if BEHIND_CLOCK.match(source, end):
        return True
    is_price = BEHIND_PRICE.match(source, end)
    return not is_price and BEFORE_CLOCK.search(source, max(0, start - CLOCK_CHARS), start) is not None
