"""Dates as people write them, found in a text and given as ISO dates; an ambiguous one gives both readings."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator

MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")

# Endings in English and in languages whose months begin alike.
_ENDINGS = (
    "uary|uar|uari|vier", "ruary|ruar|ruari|braio|rero", "ch|s|zo", "il|ile", "o", "e|i|io|ho", "y|i|io|ho",
    "ust|usti|ustus", "t|tember|tembre|tembrie", "ober|obre", "ember|embre|embro|iembre", "ember|embre|embrie",
)  # fmt: skip
_NAMES = "|".join(f"{month}(?:{endings})?" for month, endings in zip(MONTHS, _ENDINGS, strict=True))
_MONTH = rf"(?P<month>{_NAMES})\.?"
_YEAR = r"(?P<year>\d{4})"
_DAY = r"(?P<day>\d{1,2})(?:st|nd|rd|th)?"
PATTERNS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"\b(?P<year>\d{4})[-/.](?P<month>\d{1,2})[-/.](?P<day>\d{1,2})\b",
        rf"\b{_DAY}[\s-]+(?:of\s+)?{_MONTH}[\s,-]+{_YEAR}\b",
        rf"\b{_MONTH}\s+{_DAY}[\s,]+{_YEAR}\b",
        r"\b(?P<day>\d{1,2})[./-](?P<month>\d{1,2})[./-](?P<year>\d{4})\b",
        r"\b(?P<month>\d{1,2})[./-](?P<day>\d{1,2})[./-](?P<year>\d{4})\b",
    )
)


def find_dates(text: str) -> Iterator[tuple[str, int, int]]:
    """Every (ISO date, start, end) in the text."""
    for pattern in PATTERNS:
        for match in pattern.finditer(text):
            iso = _to_iso(match["year"], match["month"], match["day"])
            if iso is not None:
                yield iso, match.start(), match.end()


def _to_iso(year: str, month: str, day: str) -> str | None:
    number = MONTHS.index(month[:3].lower()) + 1 if not month.isdigit() else int(month)
    try:
        return datetime.date(int(year), number, int(day)).isoformat()
    except ValueError:
        return None
