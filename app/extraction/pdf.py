"""PDF files: the text of their pages, and pages as images. Both are read in a process of their own."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from app.extraction.decoding import UnreadableSource
from engine import is_unicode

MAX_PDF_BYTES = 64 * 2**20
MAX_PDF_PAGES = 500
MAX_PDF_SECONDS = 60
MAX_IMAGES = 32  # pages that become images; the engine takes as many per request
TEXT_READER, IMAGE_READER = (Path(__file__).with_name(f"pdf_{what}.py") for what in ("text", "images"))
NO_TEXT = "has no text in it (scanned pages are pictures); run it through OCR first"


def read_pdf(data: bytes, name: str, with_images: bool = False) -> tuple[list[str], tuple[bytes, ...]]:
    """Return the text of each page and, if wanted, JPEG images of the pages that have marks but no text.

    Raises:
        UnreadableSource: the file is broken, locked, too long, too slow, or has neither text nor such pages.
    """
    limits = (MAX_PDF_PAGES, MAX_PDF_BYTES, 2 * int(MAX_PDF_SECONDS) + 1)
    found = _run(TEXT_READER, data, name, map(str, limits))
    pages = [_mend_pairs(page.strip()) for page in found["pages"]]
    silent = [number for number, page in enumerate(pages) if not page]
    images = _render(data, name, {"numbers": silent}) if silent and with_images else []
    if not any(pages) and not images:
        raise UnreadableSource(f"{name} {NO_TEXT}")
    return pages, tuple(images)


def render_page(data: bytes, name: str, number: int, quote: str = "", before: str = "") -> bytes:
    """Return a page, counted from 0, as JPEG.

    Args:
        quote: a part of the page's text to highlight.
        before: the text of the page in front of it, which distinguishes equal quotes.

    Raises:
        UnreadableSource: as read_pdf.
    """
    mark, earlier = _squeeze(quote), _squeeze(before)
    asked = {"numbers": [number], "mark": mark, "place": earlier.count(mark) if mark else 0}
    return _render(data, name, asked)[0]


def _squeeze(text: str) -> str:
    """Return the text without spaces, with which two readers of a PDF agree best."""
    return "".join(unicodedata.normalize("NFKC", text).split())


def _render(data: bytes, name: str, asked: dict[str, Any]) -> list[bytes]:
    limits = {"max_images": MAX_IMAGES, "max_seconds": 2 * int(MAX_PDF_SECONDS) + 1}
    found = _run(IMAGE_READER, json.dumps(asked | limits).encode() + b"\n" + data, name)
    return [base64.b64decode(image) for image in found["images"]]


def _run(reader: Path, given: bytes, name: str, arguments: Iterable[str] = ()) -> dict[str, Any]:
    """Return the answer of a reader."""
    try:
        # -P: the other files in the reader's folder must not hide modules of the standard library.
        child = subprocess.run(
            [sys.executable, "-P", reader, *arguments],
            input=given,
            capture_output=True,
            timeout=MAX_PDF_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise UnreadableSource(
            f"{name} takes longer than {MAX_PDF_SECONDS} s to read; split it or save it as text"
        ) from error
    if child.returncode:
        lines = child.stderr.decode(errors="replace").splitlines() or [f"exit code {child.returncode}"]
        raise UnreadableSource(f"{name} cannot be read as PDF: {lines[-1].partition(': ')[2] or lines[-1]}")
    found: dict[str, Any] = json.loads(child.stdout)
    if "refused" in found:
        raise UnreadableSource(f"{name} {found['refused']}")
    return found


def _mend_pairs(text: str) -> str:
    """The same text with surrogate pairs joined that a PDF's font gave half by half; a lone half becomes U+FFFD."""
    if is_unicode(text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
