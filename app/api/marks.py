"""What tells a mark in a text that comes in pieces, where the end of what is there may be its beginning."""

from __future__ import annotations


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of the text that begins the mark, without being all of it."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
