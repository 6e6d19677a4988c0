"""Where a part of a page's text is shown: a box for each of its lines.

Each word of a page is 24 bytes: its offsets in the page's text, and left, top, right and bottom.
"""

from __future__ import annotations

import struct

WORD = struct.Struct("<2i4f")
SAME_LINE = 0.5  # of the height of a word, by which the next one overlaps it


def find_boxes(words: bytes, start: int, end: int) -> list[dict[str, float]]:
    """Return the boxes that show the half-open range of a page's text, rounded to a tenth."""
    lines: list[list[float]] = []
    for first, last, left, top, right, bottom in WORD.iter_unpack(words):
        if first >= end or last <= start:
            continue
        if right - left > bottom - top:  # a part of a word, if that is not written upwards
            each = (right - left) / (last - first)
            left, right = left + max(start - first, 0) * each, right - max(last - end, 0) * each
        before = lines[-1] if lines else None
        overlap = min(before[3], bottom) - max(before[1], top) if before else 0
        if before and overlap > SAME_LINE * (bottom - top):
            before[:] = min(before[0], left), min(before[1], top), max(before[2], right), max(before[3], bottom)
        else:
            lines.append([left, top, right, bottom])
    names = ("left", "top", "right", "bottom")
    return [{name: round(value, 1) for name, value in zip(names, line, strict=True)} for line in lines]
