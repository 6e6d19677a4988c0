"""The opened file: its text and images for the model, and the pages of a PDF as shown beside the record."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from app.extraction import Evidence, Source
from app.extraction.boxes import find_boxes
from app.extraction.decoding import UnreadableSource
from app.extraction.files import read_file
from app.extraction.pdf import render_page
from app.extraction.reading import read_apart
from app.extraction.sources import (
    FILE_COLUMN,
    IMAGE_TYPES,
    MAX_FILE_BYTES,
    OFFICE_TYPES,
    SHEET_TYPES,
    TEXT_COLUMN,
    read_bytes,
    read_rows,
    read_text,
)

MAX_TEXT_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Opened:
    """A file that a person opened: a text, a photo or a PDF, by its suffix."""

    path: Path
    source: Source
    is_table: bool = False  # in Batch each of its rows becomes a record

    @property
    def digest(self) -> str:
        """Return a hash of the images; "" without any."""
        files = [each for each in self.source.images if isinstance(each, bytes)]
        return hashlib.sha256(b"".join(files)).hexdigest() if files else ""

    @property
    def is_pdf(self) -> bool:
        return self.path.suffix.lower() == ".pdf"

    @property
    def is_photo(self) -> bool:
        return self.path.suffix.lower() in IMAGE_TYPES


def open_path(path: Path, sees_images: bool) -> Opened:
    """Read a file.

    Raises UnreadableSource: it cannot be read, or the model does not see what it shows.
    """
    suffix = path.suffix.lower()
    if suffix in (".pdf", *OFFICE_TYPES, *IMAGE_TYPES):
        source = read_rows(path, with_images=sees_images)[0].pick(TEXT_COLUMN)
        is_table = suffix in SHEET_TYPES and {*read_file(path).columns} != {FILE_COLUMN, TEXT_COLUMN}
        return Opened(path, source, is_table)
    # A table is one text here.
    return Opened(path, Source(path.name, read_text(path, MAX_TEXT_BYTES)), suffix in (".csv", ".tsv"))


async def show_page(opened: Opened, number: int, evidence: Evidence | None = None) -> str:
    """Return a page of a PDF, counted from 1, as HTML, with the place of a value highlighted."""
    start = opened.source.page_starts[number - 1]
    words = opened.source.boxes[number - 1]
    boxes = [] if evidence is None else find_boxes(words, evidence.start - start, evidence.end - start)
    try:
        image = await read_apart(opened.path, _render, opened.path, number - 1, boxes)
    except UnreadableSource as error:
        return f'<div class="empty"><p>{html.escape(str(error))}.</p></div>'
    count = len(opened.source.page_starts)
    buttons = [
        f'<button type="button" data-number="{to}" aria-label="{word} page"{"" if 1 <= to <= count else " disabled"}>'
        f"{sign}</button>"
        for to, word, sign in ((number - 1, "Previous", "‹"), (number + 1, "Next", "›"))
    ]
    data = base64.b64encode(image).decode()
    name = f"Page {number} of {html.escape(opened.path.name, quote=True)}"
    return (
        f'<div class="page"><div class="turn">{buttons[0]}<span role="status">Page {number} of {count}</span>'
        f'{buttons[1]}</div><img src="data:image/jpeg;base64,{data}" alt="{name}"></div>'
    )


def _render(path: Path, number: int, boxes: Sequence[dict[str, float]]) -> bytes:
    return render_page(read_bytes(path, path.name, MAX_FILE_BYTES), path.name, number, boxes)
