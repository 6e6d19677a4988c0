"""Counts the rows of a text's table: a list of the record with fewer items may lack some."""

from __future__ import annotations

import re

from app.extraction.dates import find_dates

# A row ends in an amount, or has several cells: two spaces, a tab or a bar apart.
AMOUNT_AT_END = re.compile(r"\d[\d.,]*\s*(?:[A-Z]{3}|[€$£])?\s*$")
CELLS = re.compile(r"\s{2,}|\t|\s*\|\s*|;")
NUMBER = re.compile(r"\d")
# Above a table: "Date: 14 March 2026", "Invoice 7731 of 2026". Lines that end in a date are not of a table, either.
LABEL = re.compile(
    r"[^\W\d][^:\d]*:\s|(?:invoice|order|receipt|date|due|tel|phone|fax|ref|customer|account)\.?"
    r"(?: (?:no|nr|number|date|id|of|by|on)\b\.?)*\s*[#+]?\d",
    re.IGNORECASE,
)
SUM = re.compile(r"\b(?:sub)?total\b|\bsum\b|\bvat\b|\btax\b|\bbalance\b|\bpage\b", re.IGNORECASE)
# Other lines that may stand between two rows, as at the break of a page.
MAX_BETWEEN = 4
MIN_ROWS = 3


def count_rows(text: str) -> int:
    """Return the rows of the longest table; 0 for fewer than three, which prose may have."""
    longest = run = between = 0
    for line in filter(None, map(str.strip, text.splitlines())):
        cells = [cell for cell in CELLS.split(line) if cell.strip()]
        num_numbers = sum(bool(NUMBER.search(word)) for word in line.split())
        is_row = (
            num_numbers >= 2
            and not SUM.search(line)
            and (len(cells) >= 3 or (bool(AMOUNT_AT_END.search(line)) and not _is_head(line)))
        )
        if is_row:
            run, between = run + 1, 0
        else:
            between += 1
            if between > MAX_BETWEEN:
                run = 0
        longest = max(longest, run)
    return longest if longest >= MIN_ROWS else 0


def _is_head(line: str) -> bool:
    return bool(LABEL.match(line)) or any(end == len(line) for _, _, end in find_dates(line))
