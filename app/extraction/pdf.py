"""PDF files: the text of their pages, and pages as images. Both are read in a process of their own (pdf_child.py)."""

from __future__ import annotations

import base64
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.extraction.decoding import UnreadableSource

MAX_PDF_PAGES = 500
MAX_PDF_CHARS = 10_000_000
MAX_PDF_SECONDS = 30  # of processor time; other work may make it wait for four times as long
MAX_PDF_MEMORY = 2**30  # bytes of address space
MAX_IMAGES = 32  # pages that become images; the engine takes as many per request
READER = Path(__file__).with_name("pdf_child.py")
NO_TEXT = "has no text in it (scanned pages are pictures); run it through OCR first"


@dataclass(frozen=True, slots=True)
class PdfText:
    """The text of each page, JPEG images of pages without text if wanted, and a note on those."""

    pages: list[str]
    images: tuple[bytes, ...]
    notes: tuple[str, ...]


def read_pdf(data: bytes, name: str, with_images: bool = False) -> PdfText:
    """Read the pages; with images, those that have marks but no text are drawn."""
    limits = {"max_pages": MAX_PDF_PAGES, "max_chars": MAX_PDF_CHARS, "max_images": MAX_IMAGES * with_images}
    found = _run(data, name, limits)
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
    (image,) = _run(data, name, {"number": number, "start": start, "end": end})["images"]
    return base64.b64decode(image)


def _run(data: bytes, name: str, asked: dict[str, Any]) -> dict[str, Any]:
    """Return the answer of the reader."""
    limits = [MAX_PDF_SECONDS, MAX_PDF_MEMORY]
    too_slow = f"{name} takes longer than {MAX_PDF_SECONDS} s to read; split it or save it as text"
    try:
        # -P: the other files in the reader's folder must not hide modules of the standard library.
        child = subprocess.run(
            [sys.executable, "-P", READER], input=json.dumps(asked | {"limits": limits}).encode() + b"\n" + data,
            capture_output=True, timeout=4 * MAX_PDF_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise UnreadableSource(too_slow) from error
    if child.returncode == -signal.SIGXCPU:
        raise UnreadableSource(too_slow)
    if child.returncode:
        lines = child.stderr.decode(errors="replace").splitlines() or [""]
        reason = lines[-1].partition(": ")[2] or lines[-1]
        if child.returncode < 0 or "MemoryError" in lines[-1]:
            reason = f"it is damaged, or needs more than {MAX_PDF_MEMORY >> 20} MiB of memory"
        raise UnreadableSource(f"{name} cannot be read as PDF: {reason}")
    found: dict[str, Any] = json.loads(child.stdout)
    if "refused" in found:
        raise UnreadableSource(f"{name} {found['refused']}")
    return found
