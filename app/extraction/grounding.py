"""Evidence: the range of the source text that shows a value of the record.

exact        the source has the value's characters
normalised   it differs in case, spaces, quotes or dashes, or is the same date, time or number in another spelling
none         the source does not show it; the model concluded it or made it up
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from app.extraction.dates import find_dates
from app.extraction.json_spans import Leaf, Path, Scalar

Match = Literal["exact", "normalised", "none"]

# A space may separate groups of three digits: "12 500", but not "7 30".
NUMBER = re.compile(r"\d+(?:[.,'\u00a0\u202f]\d+| \d{3}(?!\d))*")
# A minus sign of the digits after it, not a hyphen, a range or a list bullet.
SIGN = re.compile(r"(?<![\w.,)\]-])[-−](?:[€$£¥]\s?)?\Z")
SIGN_CHARS = 4
# A line break counts as this many characters of distance between two values.
LINE_DISTANCE = 100
NUMBER_WORDS = (
    *("zero", "one", "two", "three", "four", "five", "six"),
    *("seven", "eight", "nine", "ten", "eleven", "twelve"),
)
CLOCK = re.compile(
    r"\b(?P<hour>\d{1,2})(?:(?P<mark>[:.h])(?P<minute>\d{2}))?(?P<half>\s*[ap]\.?\s?m\b|[ap]\b)?\b(?!\d)",
    re.IGNORECASE,
)
# "7.30" may be a time or a price. The text around it decides, see BEFORE_CLOCK, BEHIND_CLOCK and BEHIND_PRICE.
DOTTED = r"\d{1,2}\.\d{2}"
BEFORE_CLOCK = re.compile(
    r"\b(?:at|from|until|till|to|by|before|after|between|and|time|starts?|ends?|opens?|closes?|doors|um|ab|von|bis|gegen)"
    rf"(?::\s*|\s+)(?:(?:about|around|ca\.?)\s+)?(?:{DOTTED}\s?[-–]\s?)?\Z",
    re.IGNORECASE,
)
BEHIND_CLOCK = re.compile(
    rf"(?:\s?[-–]\s?{DOTTED})?\s?(?:[ap]\.?\s?m|h|hrs?|hours|o'clock|uhr)\b", re.IGNORECASE
)
BEHIND_PRICE = re.compile(
    r"\s?(?:[€$£¥%]|(?:eur|usd|gbp|chf|euros?|dollars?|pounds?|percent|each|per)\b)", re.IGNORECASE
)
CLOCK_CHARS = 40  # characters searched before a time
# Shorter values match whole words only ("Tea" is not in "Steam"), except in scripts without spaces between words.
MIN_INNER_CHARS = 4
UNSPACED = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]{2}")
SAME_CHARACTERS = str.maketrans({"’": "'", "‘": "'", "“": '"', "”": '"', "–": "-", "—": "-", "‑": "-"})


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
    for leaf in leaves:
        if isinstance(leaf.value, bool) or leaf.value is None or leaf.value == "":
            continue
        key = type(leaf.value), leaf.value
        if key not in known:
            known[key] = finder.find(leaf.value)
        match, spans = known[key]
        places = [at for at, step in enumerate(leaf.path) if isinstance(step, int)]
        if not spans:
            found[leaf.pointer] = NO_EVIDENCE
            continue
        if places:
            # Use the outermost list that contains the value: its items are usually in the order of the source.
            reader = lists.setdefault(leaf.path[: places[0]], _ListReader(source))
            start, end = reader.pick(leaf.path[: places[0] + 1], leaf.path[: places[-1] + 1], spans)
        else:
            start, end = spans[0]
        found[leaf.pointer] = Evidence(match, start, end, source[start:end])
    return found


class _ListReader:
    """Assigns the values of one list to source spans; each span is evidence for one value only.

    The first value of an item is searched after the previous item. Its other values take the span nearest to those
    already found, on either side, preferably in the same line. A value with no free span shares one.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.taken = bytearray(len(source))  # 1 for each character that earlier items use
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
        free = [span for span in spans if span not in self.own and self.taken.find(1, *span) < 0]
        if not free:
            return next((span for span in spans if span[0] >= start), spans[0])
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
            self.before = min(start for start, _ in self.own), max(end for _, end in self.own)
        self.own, self.near = set(), []

    def nearest(self, spans: list[Span]) -> Span:
        """Return the span closest to the spans in `near`."""
        closest: list[tuple[int, Span]] = []
        for start, end in self.near:
            at = bisect_left(spans, (start, 0))
            closest += [(self.distance(end, span[0]), span) for span in spans[at : at + 1]]
            closest += [(self.distance(span[1], start), span) for span in spans[max(at - 1, 0) : at]]
        # At equal distance the later span wins.
        return min(closest, key=lambda each: (each[0], -each[1][0]))[1]

    def distance(self, start: int, end: int) -> int:
        return max(end - start, 0) + LINE_DISTANCE * self.source.count("\n", start, end)


class _Finder:
    """Finds values in the source; the folded text, dates and numbers of the source are computed once."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.folded, self.origin = _fold(source)
        self.marks, self.folded_marks = list_marks(source), list_marks(self.folded)
        self.dates = list(find_dates(source))
        self.numbers = list(find_numbers(source))

    def find(self, value: str | float) -> tuple[Match, list[Span]]:
        """Return every span that shows the value, sorted, and how well they match."""
        if isinstance(value, str):
            spans = _occurrences(self.source, value, self.marks)
            if spans:
                return "exact", spans
            return "normalised", sorted(self._folded_occurrences(value) or self._other_spellings(value))
        spans = self._numbers_as_written(value)
        return ("exact", spans) if spans else ("normalised", self._numbers_equal(value))

    def _folded_occurrences(self, value: str) -> list[Span]:
        folded, _ = _fold(value)
        spans = _occurrences(self.folded, folded, self.folded_marks) if folded else []
        return [(self.origin[start][0], self.origin[end - 1][1]) for start, end in spans]

    def _other_spellings(self, value: str) -> list[Span]:
        dates = [(start, end) for iso, start, end in self.dates if iso == value]
        # A time like 14:30 in another spelling: 2:30 pm, 2.30 p.m., noon.
        wanted = re.fullmatch(r"(\d{2}:\d{2})(?::00)?", value)
        return dates or [span for clock, span in find_clocks(self.source) if wanted and clock == wanted[1]]

    def _numbers_as_written(self, value: float) -> list[Span]:
        written = repr(value)
        digits = _occurrences(self.source, written.removeprefix("-"), self.marks, is_number=True)
        signed = [(find_sign(self.source, start), end) for start, end in digits]
        return [span for span in signed if self.source[slice(*span)] == written]

    def _numbers_equal(self, value: float) -> list[Span]:
        spans = [
            span
            for readings, is_negative, span in self.numbers
            if abs(value) in readings and (value < 0) == is_negative
        ]
        if not spans and value in range(len(NUMBER_WORDS)):
            word = NUMBER_WORDS[int(value)]
            spans = [match.span() for match in re.finditer(rf"\b{word}\b", self.source, re.IGNORECASE)]
        return spans


def _occurrences(text: str, value: str, marks: str, is_number: bool = False) -> list[Span]:
    """Return where the value occurs as whole words; for longer values, otherwise inside words.

    Args:
        marks: combining marks of the text. A character followed by a mark is a different character.
    """
    edge = rf"[\w.,{marks}]" if is_number else rf"[\w{marks}]"
    before = rf"(?<!{edge})" if re.match(r"\w", value) else ""
    after = rf"(?![\w{marks}]|[.,]\d)" if is_number else rf"(?!{edge})" if re.search(r"\w$", value) else ""
    part = re.escape(value) + (rf"(?![{marks}])" if marks else "")
    whole = [match.span() for match in re.finditer(before + part + after, text)]
    if whole or is_number or (len(value) < MIN_INNER_CHARS and not UNSPACED.search(value)):
        return whole
    return [match.span() for match in re.finditer(part, text)]


def list_marks(text: str) -> str:
    """Return the combining marks of the text, sorted. None of them has a meaning in a regex."""
    return "" if text.isascii() else "".join(sorted(char for char in set(text) if _is_mark(char)))


def _is_mark(char: str) -> bool:
    """Return whether it is an accent, a vowel sign, a Korean vowel or final, or a voicing mark of narrow kana."""
    if "\ufe00" <= char <= "\ufe0f":
        return False  # a variation selector changes only how a character is drawn
    return (
        unicodedata.category(char)[0] == "M" or "\u1160" <= char <= "\u11ff" or "\uff9e" <= char <= "\uff9f"
    )


def _fold(text: str) -> tuple[str, list[Span]]:
    """Normalise case, width, composition, spacing and typography; also return each character's span in `text`."""
    folded: list[str] = []
    origin: list[Span] = []
    marks = list_marks(text)
    for match in re.finditer(rf"(?s:.)[{marks}]*" if marks else "(?s:.)", text):
        if match.group().isspace():
            piece = "" if not folded or folded[-1] == " " else " "
        else:
            piece = unicodedata.normalize("NFKC", match.group()).translate(SAME_CHARACTERS).casefold()
        folded += piece
        origin += [match.span()] * len(piece)
    while folded and folded[-1] == " ":
        folded.pop()
        origin.pop()
    return "".join(folded), origin


def find_sign(text: str, start: int) -> int:
    """Return the offset of the minus sign before the digits at `start`, or `start` if there is none."""
    match = SIGN.search(text, max(0, start - SIGN_CHARS), start)
    return match.start() if match else start


def find_numbers(text: str) -> Iterator[tuple[set[float], bool, Span]]:
    """Yield the possible values of each number's digits, whether a minus precedes them, and the span with the minus.

    "2 300" may be one number or two: it is yielded as a whole, and then each group alone.
    """
    for match in NUMBER.finditer(text):
        spans = [match.span()]
        if " " in match.group():
            spans += [
                (match.start() + part.start(), match.start() + part.end())
                for part in re.finditer("[^ ]+", match.group())
            ]
        for first, end in spans:
            start = find_sign(text, first)
            yield read_number(text[first:end]), start < first, (start, end)


def read_number(number: str) -> set[float]:
    """Return the possible values: 1,234.50 and 1.234,50 are conventions of different countries, 1,234 fits both."""
    plain = re.sub(r"[' \u00a0\u202f](?=\d{3})", "", number)
    readings = set()
    for thousands, point in ((",", "."), (".", ",")):
        shape = rf"(\d{{1,3}}(\{thousands}\d{{3}})+|\d+)(\{point}\d+)?"
        if re.fullmatch(shape, plain):
            readings.add(float(plain.replace(thousands, "").replace(point, ".")))
    return readings


def find_clocks(source: str) -> Iterator[tuple[str, Span]]:
    """Yield each time of day as HH:MM with its span."""
    for match in CLOCK.finditer(source):
        clock = _read_clock(match)
        if clock is not None:
            yield f"{clock[0]:02}:{clock[1]:02}", match.span()
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
