"""PDF files: the text of their pages, and pages as images. Both are read in a process of their own (readers/pdf.py).

Pages without text are pictures, as a scanner makes them: a model that sees images gets them; for others Tesseract reads
them, if it is installed.
"""

from __future__ import annotations

import base64
import functools
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from app.extraction.child import run_child
from app.extraction.decoding import UnreadableSource

MAX_PDF_PAGES = 500
MAX_PDF_CHARS = 10_000_000
MAX_IMAGES = 32  # pages that become images, or are read by Tesseract; the engine takes as many per request
NO_OCR = "install tesseract-ocr to have pictures read, or serve a model that sees images"
MAX_LANGUAGES = 4  # each makes Tesseract slower


@dataclass(frozen=True, slots=True)
class PdfText:
    """The text of each page, JPEG images of pages without text if wanted, a note on those, and the words' boxes."""

    pages: list[str]
    images: tuple[bytes, ...]
    notes: tuple[str, ...]
    boxes: tuple[bytes, ...]


@functools.cache
def find_ocr() -> tuple[str, ...]:
    """Return the command of Tesseract with its installed languages; empty if it is not installed."""
    program = shutil.which("tesseract")
    if program is None:
        return ()
    listed = subprocess.run([program, "--list-langs"], capture_output=True, text=True).stdout.splitlines()[1:]
    languages = [name for name in listed if name not in ("osd", "equ", "snum")]
    return (program, "-l", "+".join(languages[:MAX_LANGUAGES])) if languages else ()


def read_pdf(data: bytes, name: str, with_images: bool = False) -> PdfText:
    """Read the pages; those that have marks but no text are drawn with images, and recognised without."""
    ocr = () if with_images else find_ocr()
    found = run_child(
        "pdf.read_pages", data, name, 10 if ocr else 4, max_pages=MAX_PDF_PAGES, max_chars=MAX_PDF_CHARS,
        max_images=MAX_IMAGES * (with_images or bool(ocr)), ocr=ocr,
    )
    pages, images = found["pages"], tuple(map(base64.b64decode, found["images"]))
    if not any(pages) and not images:
        raise UnreadableSource(f"{name} has no text in it (scanned pages are pictures): {NO_OCR}")
    silent = [number for number, page in enumerate(pages, 1) if not page]
    attachments = f"{name}: attachments left out: {', '.join(found['attachments'])}" if found["attachments"] else ""
    notes = (
        describe_pages(name, silent, "no text"), describe_pages(name, found["recognised"], "text read by OCR"),
        describe_pages(name, found["unread"], "pictures that were not read"),
        describe_pages(name, found["unmapped"], "characters for which the file names no letter"), attachments,
    )
    return PdfText(pages, images, tuple(filter(None, notes)), tuple(map(base64.b64decode, found["boxes"])))


def read_picture(data: bytes, name: str) -> tuple[str, bytes]:
    """Return the text of a picture, and the boxes of its words in pixels.

    Raises UnreadableSource: it has none, or Tesseract is not installed.
    """
    if not (ocr := find_ocr()):
        raise UnreadableSource(f"{name} is an image, which this model does not see: {NO_OCR}")
    found = run_child("scans.read_image", data, name, 10, ocr=ocr)
    if not found["text"]:
        raise UnreadableSource(f"{name} is an image in which Tesseract finds no text, and this model sees none")
    return found["text"], base64.b64decode(found["boxes"])


def describe_pages(name: str, numbers: Sequence[int], what: str) -> str:
    """Return a note on pages, "" without any."""
    have = "have" if len(numbers) > 1 else "has"
    return f"{name}: page{'s' * (len(numbers) > 1)} {', '.join(_name_ranges(numbers))} {have} {what}" if numbers else ""


def _name_ranges(numbers: Sequence[int]) -> Iterator[str]:
    """Yield 2, 5-7 for 2, 5, 6, 7."""
    known = set(numbers)
    firsts = [number for number in numbers if number - 1 not in known]
    lasts = [number for number in numbers if number + 1 not in known]
    for first, last in zip(firsts, lasts, strict=True):
        yield str(first) if first == last else f"{first}-{last}"


def render_page(data: bytes, name: str, number: int, boxes: Sequence[dict[str, float]] = ()) -> bytes:
    """Return a page, counted from 0, as JPEG, with the places of `find_boxes` highlighted.

    Raises UnreadableSource: as read_pdf.
    """
    found = run_child("pdf.render_page", data, name, number=number, boxes=[list(box.values()) for box in boxes])
    return base64.b64decode(found["images"][0])
