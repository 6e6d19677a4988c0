"""Text files in a chat: read where they were uploaded, and written into the message in a fence of their own."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from app.extraction.sources import UnreadableSource, read_text
from app.ui.files import read_apart
from engine import InvalidRequest

FILE_TYPES = ["text", ".md", ".csv", ".json", ".jsonl", ".log", ".html", ".xml", ".eml", ".py", ".pdf"]
MAX_BYTES = 4 * 2**20


async def add_attachments(text: str, paths: Iterable[str | Path]) -> str:
    """The message with the files' texts behind it.

    Raises:
        InvalidRequest: a file cannot be read as text; the message names it.
    """
    parts = [text.strip()] if text.strip() else []
    for path in map(Path, paths):
        parts.append(f"{path.name}\n{fence(await read_apart(read_attachment, path))}")
    return "\n\n".join(parts)


def read_attachment(path: Path) -> str:
    """The text of one file."""
    try:
        return read_text(path, MAX_BYTES)
    except UnreadableSource as error:
        raise InvalidRequest(str(error), "attachment") from error


def fence(text: str) -> str:
    """The text between fences that it does not contain itself."""
    longest = max((len(run) for run in re.findall(r"`{3,}", text)), default=2)
    mark = "`" * (longest + 1)
    return f"{mark}\n{text.rstrip()}\n{mark}"
