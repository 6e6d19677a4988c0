"""Counts the rows of a table in a plain text, so that a list which is too short shows."""

from __future__ import annotations

import re

# A row ends in an amount, or has several cells: two spaces, a tab or a bar apart.
AMOUNT_AT_END = re.compile(r"\d[\d.,]*\s*(?:[A-Z]{3}|[€$£])?\s*$")
CELLS = re.compile(r"\s{2,}|\t|\s*\|\s*|;")
NUMBER = re.compile(r"\d")
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
        is_row = num_numbers >= 2 and not SUM.search(line) and (len(cells) >= 3 or bool(AMOUNT_AT_END.search(line)))
        if is_row:
            run, between = run + 1, 0
        else:
            between += 1
            if between > MAX_BETWEEN:
                run = 0
        longest = max(longest, run)
    return longest if longest >= MIN_ROWS else 0
