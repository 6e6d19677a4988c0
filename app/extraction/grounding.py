"""Evidence: where in the source text a value of the record stands.

exact        the value's characters stand there
normalised   the same but for case, spaces, quotes and dashes, or the same date, time or number written otherwise
none         nowhere; the model concluded it, or made it up
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from app.extraction.dates import find_dates
from app.extraction.json_spans import Leaf

Match = Literal["exact", "normalised", "none"]

NUMBER = re.compile(r"\d+(?:[.,' \u00a0\u202f]\d+)*")
NUMBER_WORDS = (
    *("zero", "one", "two", "three", "four", "five", "six"),
    *("seven", "eight", "nine", "ten", "eleven", "twelve"),
)
CLOCK = re.compile(r"\b(\d{1,2})(?:[:.h](\d{2}))?\s*([ap])?\.?m?\b", re.IGNORECASE)
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
    """Evidence of every string and number by JSON pointer; true, false, null and "" have none to find."""
    finder = _Finder(source)
    found: dict[str, Evidence] = {}
    read_until: dict[str, int] = {}
    for leaf in leaves:
        if isinstance(leaf.value, bool) or leaf.value is None or leaf.value == "":
            continue
        # The items of a list usually stand in order: look for each one behind the one before.
        group = _list_of(leaf.pointer)
        evidence = finder.find(leaf.value, read_until.get(group, 0) if group else 0)
        found[leaf.pointer] = evidence
        if group and evidence.match != "none":
            read_until[group] = evidence.end
    return found


class _Finder:
    """The source in the forms that values are looked up in, each made once."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.folded, self.origin = _fold(source)
        self.dates = list(find_dates(source))
        self.numbers = [(read_number(match.group()), match.span()) for match in NUMBER.finditer(source)]

    def find(self, value: str | float, after: int) -> Evidence:
        if isinstance(value, str):
            return (
                self._pick("exact", _occurrences(self.source, value), after)
                or self._pick("normalised", self._folded_occurrences(value), after)
                or self._pick("normalised", self._other_spellings(value), after)
                or NO_EVIDENCE
            )
        return (
            self._pick("exact", _occurrences(self.source, repr(value), is_number=True), after)
            or self._pick("normalised", self._numbers_equal(value), after)
            or NO_EVIDENCE
        )

    def _pick(self, match: Match, spans: Iterable[Span], after: int) -> Evidence | None:
        candidates = sorted(spans)
        if not candidates:
            return None
        start, end = next((span for span in candidates if span[0] >= after), candidates[0])
        return Evidence(match, start, end, self.source[start:end])

    def _folded_occurrences(self, value: str) -> list[Span]:
        folded, _ = _fold(value)
        spans = _occurrences(self.folded, folded) if folded else []
        return [(self.origin[start], self.origin[end - 1] + 1) for start, end in spans]

    def _other_spellings(self, value: str) -> list[Span]:
        dates = [(start, end) for iso, start, end in self.dates if iso == value]
        return dates or _clocks_equal(self.source, value)

    def _numbers_equal(self, value: float) -> list[Span]:
        spans = [span for readings, span in self.numbers if value in readings]
        if not spans and value in range(len(NUMBER_WORDS)):
            word = NUMBER_WORDS[int(value)]
            spans = [match.span() for match in re.finditer(rf"\b{word}\b", self.source, re.IGNORECASE)]
        return spans


def _occurrences(text: str, value: str, is_number: bool = False) -> list[Span]:
    """Where the value stands: as whole words, else (text only) inside words."""
    edge = r"[\w.,]" if is_number else r"\w"
    before = rf"(?<!{edge})" if re.match(r"\w", value) else ""
    after = r"(?!\w|[.,]\d)" if is_number else r"(?!\w)" if re.search(r"\w$", value) else ""
    whole = [match.span() for match in re.finditer(before + re.escape(value) + after, text)]
    if whole or is_number or len(value) < 3:
        return whole
    return [match.span() for match in re.finditer(re.escape(value), text)]


def _fold(text: str) -> tuple[str, list[int]]:
    """The text without differences of case, width, spacing and typography, and each character's origin."""
    folded: list[str] = []
    origin: list[int] = []
    for index, char in enumerate(text):
        if char.isspace():
            piece = "" if not folded or folded[-1] == " " else " "
        else:
            piece = unicodedata.normalize("NFKC", char).translate(SAME_CHARACTERS).casefold()
        folded += piece
        origin += [index] * len(piece)
    while folded and folded[-1] == " ":
        folded.pop()
        origin.pop()
    return "".join(folded), origin


def read_number(number: str) -> set[float]:
    """What a written number may mean: 1,234.50 and 1.234,50 differ by country, and 1,234 is either."""
    plain = re.sub(r"[' \u00a0\u202f](?=\d{3})", "", number)
    readings = set()
    for thousands, point in ((",", "."), (".", ",")):
        shape = rf"(\d{{1,3}}(\{thousands}\d{{3}})+|\d+)(\{point}\d+)?"
        if re.fullmatch(shape, plain):
            readings.add(float(plain.replace(thousands, "").replace(point, ".")))
    return readings


def _clocks_equal(source: str, value: str) -> list[Span]:
    """Where a time like 14:30 stands in another spelling (2:30 pm, 2.30 p.m., noon)."""
    wanted = re.fullmatch(r"(\d{2}):(\d{2})(?::00)?", value)
    if wanted is None:
        return []
    hour, minute = int(wanted[1]), int(wanted[2])
    spans = []
    for match in CLOCK.finditer(source):
        if match[2] is None and match[3] is None:
            continue
        half = (match[3] or "").lower()
        read = int(match[1]) % 12 + (12 if half == "p" else 0) if half else int(match[1])
        if (read, int(match[2] or 0)) == (hour, minute):
            spans.append(match.span())
    if (hour, minute) == (12, 0):
        spans += [match.span() for match in re.finditer(r"\bnoon\b", source, re.IGNORECASE)]
    return spans


def _list_of(pointer: str) -> str:
    """The pointer of the outermost list that holds this value, "" outside of lists."""
    steps = pointer.split("/")
    index = next((i for i, step in enumerate(steps) if step.isdigit()), None)
    return "/".join(steps[:index]) if index else ""
