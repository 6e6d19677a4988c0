"""PDF files: the text of their pages, and pages as images. Both are read in a process of their own (pdf_child.py)."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from app.extraction.child import run_child
from app.extraction.decoding import UnreadableSource

MAX_PDF_PAGES = 500
MAX_PDF_CHARS = 10_000_000
MAX_IMAGES = 32  # pages that become images; the engine takes as many per request
NO_TEXT = "has no text in it (scanned pages are pictures); run it through OCR first"


@dataclass(frozen=True, slots=True)
class PdfText:
    """The text of each page, JPEG images of pages without text if wanted, and a note on those."""

    pages: list[str]
    images: tuple[bytes, ...]
    notes: tuple[str, ...]


def read_pdf(data: bytes, name: str, with_images: bool = False) -> PdfText:
    """Read the pages; with images, those that have marks but no text are drawn."""
    found = run_child(
        "pdf_child.read_pages", data, name, max_pages=MAX_PDF_PAGES, max_chars=MAX_PDF_CHARS,
        max_images=MAX_IMAGES * with_images,
    )
    pages, images = found["pages"], tuple(map(base64.b64decode, found["images"]))
    if not any(pages) and not images:
        raise UnreadableSource(f"{name} {NO_TEXT}")
    silent = [number for number, page in enumerate(pages, 1) if not page]
    shown = ", ".join(_name_ranges(silent))
    note = f"{name}: page{'s' * (len(silent) > 1)} {shown} {'have' if len(silent) > 1 else 'has'} no text"
    return PdfText(pages, images, (note,) if silent else ())


def _name_ranges(numbers: Sequence[int]) -> Iterator[str]:
    """Yield 2, 5-7 for 2, 5, 6, 7."""
    known = set(numbers)
    firsts = [number for number in numbers if number - 1 not in known]
    lasts = [number for number in numbers if number + 1 not in known]
    for first, last in zip(firsts, lasts, strict=True):
        yield str(first) if first == last else f"{first}-{last}"


def render_page(data: bytes, name: str, number: int, start: int = 0, end: int = 0) -> bytes:
    """Return a page, counted from 0, as JPEG, with a part of its text highlighted.

    Raises UnreadableSource: as read_pdf.
    """
    found = run_child("pdf_child.render_page", data, name, number=number, start=start, end=end)
    return base64.b64decode(found["images"][0])
