"""Reads a PDF: the text of its pages by their layout, with fields and annotations, and pages as images.

The answer is {"pages": [text], "boxes": [base64], "images": [base64]} or {"refused": reason}.
"""

from __future__ import annotations

import base64
import io
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from ctypes import byref, c_ubyte
from functools import partial
from typing import Any

import pypdfium2
import pypdfium2.raw as pdfium
from PIL import Image

from .layout import Box, Run, lay_out, pack_words
from .scans import recognise

LINE_HEIGHT = 12.0  # points of a line of an annotation
HYPHENS = (2, 0xFFFE)  # how pdfium marks a hyphen at the end of a line
MULTILINE, PASSWORD = 1 << 12, 1 << 13  # flags of fields
COMMENTED = (pdfium.FPDF_ANNOT_TEXT, pdfium.FPDF_ANNOT_HIGHLIGHT, pdfium.FPDF_ANNOT_UNDERLINE,
             pdfium.FPDF_ANNOT_SQUIGGLY, pdfium.FPDF_ANNOT_STRIKEOUT, pdfium.FPDF_ANNOT_STAMP,
             pdfium.FPDF_ANNOT_CARET)
MAX_VALUE_BYTES = 2**17  # of a field or a comment
MAX_SCALE = 2.0  # pixels per point: 144 dots per inch
MAX_PIXELS = 2**21  # of a page: A4 at that scale
OCR_SCALE, OCR_PIXELS = 300 / 72, 2**23
QUALITY = 90
MARK = (15, 118, 110)  # the accent of the app
MARK_ALPHA = 80


def read_runs(page: Any, form: Any, max_chars: int) -> list[Run]:
    """Return the characters of a page in runs, and its fields and annotations.

    Raises ValueError: it has more characters.
    """
    text_page = page.get_textpage()
    raw, turn = text_page.raw, _make_turn(page)
    num_chars = text_page.count_chars()
    if num_chars > max_chars:
        raise ValueError
    angle = math.radians(page.get_rotation())
    rect = pdfium.FS_RECTF()
    runs: list[Run] = []
    last: Box | None = None
    has_space = False
    for index in range(num_chars):
        code = pdfium.FPDFText_GetUnicode(raw, index)
        if code < 33 and code not in HYPHENS:
            has_space, last = True, None if code in (10, 13) else last
            continue
        if 0xDC00 <= code < 0xE000 and runs and 0xD800 <= (high := ord(runs[-1].text[-1])) < 0xDC00:
            runs[-1].text[-1] = chr(0x10000 + (high - 0xD800) * 0x400 + code - 0xDC00)
            continue
        text = "-" if code in HYPHENS else chr(code)
        if text.isspace():
            has_space = True
            continue
        pdfium.FPDFText_GetLooseCharBox(raw, index, byref(rect))
        box = turn(rect.left, rect.bottom, rect.right, rect.top)
        if last is None or not runs[-1].follows(last, box):
            turned = abs(math.sin(pdfium.FPDFText_GetCharAngle(raw, index) + angle)) > 0.5
            runs.append(Run(box, is_turned=turned))
        elif has_space:
            runs[-1].text.append(" ")
            runs[-1].boxes.append(None)
        runs[-1].add(text, box)
        last, has_space = box, False
    for run in runs:
        run.text = ["\ufffd" if "\ud800" <= text <= "\udfff" else text for text in run.text]
    return [*runs, *_read_annotations(page, form, turn)]


def _make_turn(page: Any) -> Callable[[float, float, float, float], Box]:
    """Return the function that turns a box of the file, in which y grows upwards, as the page is shown."""
    left, bottom, right, top = page.get_cropbox()
    match page.get_rotation():
        case 90:
            return lambda x1, y1, x2, y2: (y1 - bottom, x1 - left, y2 - bottom, x2 - left)
        case 180:
            return lambda x1, y1, x2, y2: (right - x2, y1 - bottom, right - x1, y2 - bottom)
        case 270:
            return lambda x1, y1, x2, y2: (top - y2, right - x2, top - y1, right - x1)
    return lambda x1, y1, x2, y2: (x1 - left, top - y2, x2 - left, top - y1)


def _read_annotations(page: Any, form: Any, turn: Callable[[float, float, float, float], Box]) -> Iterator[Run]:
    """Yield the values of fields and free texts in their places, then the comments, which are shown at the end."""
    comments: list[Run] = []
    for index in range(pdfium.FPDFPage_GetAnnotCount(page)):
        annotation = pdfium.FPDFPage_GetAnnot(page, index)
        rect = pdfium.FS_RECTF()
        is_hidden = pdfium.FPDFAnnot_GetFlags(annotation) & pdfium.FPDF_ANNOT_FLAG_HIDDEN
        if not is_hidden and pdfium.FPDFAnnot_GetRect(annotation, byref(rect)):
            kind = pdfium.FPDFAnnot_GetSubtype(annotation)
            box = turn(rect.left, rect.bottom, rect.right, rect.top)
            if kind == pdfium.FPDF_ANNOT_WIDGET and form:
                text, is_tall = _read_field(form, annotation)
                yield from _place(text, box, is_tall)
            elif kind == pdfium.FPDF_ANNOT_FREETEXT:
                yield from _place(_read_contents(annotation), box, True)
            elif kind in COMMENTED and (text := _read_contents(annotation)):
                line = Run(box, is_turned=True)
                line.add(f"[Comment: {' '.join(text.split())}]", box)
                comments.append(line)
        pdfium.FPDFPage_CloseAnnot(annotation)
    yield from comments


def _place(text: str, box: Box, is_tall: bool) -> Iterator[Run]:
    """Yield the lines of a text from the top of its box, or the one line of a field in the middle."""
    left, top, right, _ = box
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) == 1 and not is_tall:
        yield from (_write(lines[0], box),)
        return
    for number, line in enumerate(lines):
        start = top + number * LINE_HEIGHT
        yield _write(line, (left, start, right, start + LINE_HEIGHT))


def _write(text: str, box: Box) -> Run:
    run = Run(box, is_field=True)
    run.add(text.strip(), box)
    return run


def _read_field(form: Any, annotation: Any) -> tuple[str, bool]:
    """Return the value of a form's field, and whether it has several lines."""
    kind = pdfium.FPDFAnnot_GetFormFieldType(form, annotation)
    flags = pdfium.FPDFAnnot_GetFormFieldFlags(form, annotation)
    if kind in (pdfium.FPDF_FORMFIELD_CHECKBOX, pdfium.FPDF_FORMFIELD_RADIOBUTTON):
        return ("[x]" if pdfium.FPDFAnnot_IsChecked(form, annotation) else "[ ]"), False
    options = range(pdfium.FPDFAnnot_GetOptionCount(form, annotation))
    if chosen := [each for each in options if pdfium.FPDFAnnot_IsOptionSelected(form, annotation, each)]:
        # What is shown of an option may differ from its value.
        labels = (partial(pdfium.FPDFAnnot_GetOptionLabel, form, annotation, each) for each in chosen)
        return ", ".join(map(_read_string, labels)), False
    is_text = kind == pdfium.FPDF_FORMFIELD_TEXTFIELD and not flags & PASSWORD
    if is_text or kind in (pdfium.FPDF_FORMFIELD_COMBOBOX, pdfium.FPDF_FORMFIELD_LISTBOX):
        value = _read_string(partial(pdfium.FPDFAnnot_GetFormFieldValue, form, annotation))
        return value, bool(flags & MULTILINE)
    return "", False


def _read_contents(annotation: Any) -> str:
    return _read_string(partial(pdfium.FPDFAnnot_GetStringValue, annotation, b"Contents"))


def _read_string(read: Callable[..., int]) -> str:
    """Return a text that pdfium writes as UTF-16 with a zero at the end."""
    size = min(read(None, 0), MAX_VALUE_BYTES)
    room = (c_ubyte * size)()
    if not size or read(pdfium.cast(room, pdfium.POINTER(pdfium.FPDF_WCHAR)), size) > size:
        return ""
    return bytes(room).decode("utf-16-le", "replace").split("\0")[0].replace("\r\n", "\n").replace("\r", "\n")


def read_pages(data: bytes, max_pages: int, max_chars: int, max_images: int, ocr: Sequence[str]) -> dict[str, Any]:
    """Return the text of each page, and images of those without; or why the file is refused.

    Args:
        max_images: pages without text that are drawn.
        ocr: the command that reads them instead, see `recognise`; without one they become images.
    """
    try:
        document = pypdfium2.PdfDocument(data)
    except pypdfium2.PdfiumError as error:
        if error.err_code == pdfium.FPDF_ERR_PASSWORD:
            return {"refused": "is locked with a password; save it without one first"}
        if error.err_code == pdfium.FPDF_ERR_SECURITY:
            return {"refused": "is encrypted in a way that is not read here; save it without encryption first"}
        raise
    document.init_forms()
    if len(document) > max_pages:
        return {"refused": f"has {len(document):,} pages; at most {max_pages:,} are read: split it"}
    pages: list[str] = []
    boxes: list[str] = []
    images: list[str] = []
    recognised: list[int] = []
    num_pictures = 0
    for number in range(len(document)):
        page = _open_page(document, number)
        try:
            laid_out = lay_out([] if page is None else read_runs(page, document.formenv, max_chars))
        except ValueError:
            return {"refused": f"has more than {max_chars:,} characters of text on a page or in all: split it"}
        text = "".join(laid_out.text)
        max_chars -= len(text)
        if page is not None and not text and max_images:
            image = _draw(page, OCR_SCALE, OCR_PIXELS) if ocr else _draw(page)
            if any(low != high for low, high in image.getextrema()):
                if num_pictures == max_images:
                    return {"refused": f"has more than {max_images} pages without text: split it"}
                num_pictures += 1
                if ocr:
                    laid_out = lay_out(recognise(image, page.get_size(), ocr))
                    text = "".join(laid_out.text)
                    recognised += [number + 1] * bool(text)
                else:
                    images.append(_write_jpeg(image))
        pages.append(text)
        boxes.append(pack_words(laid_out))
    return {"pages": pages, "boxes": boxes, "images": images, "recognised": recognised}


def _open_page(document: Any, number: int) -> Any:
    """Return a page, or None for a damaged one."""
    try:
        return document[number]
    except pypdfium2.PdfiumError:
        return None


def render_page(data: bytes, number: int, start: int, end: int, ocr: Sequence[str]) -> dict[str, Any]:
    """Return the image of a page, counted from 0, with a part of its text highlighted."""
    document = pypdfium2.PdfDocument(data)
    document.init_forms()
    page = document[number]
    image = _draw(page)
    boxes = []
    if end > start:
        runs = read_runs(page, document.formenv, sys.maxsize)
        if not runs and ocr:
            runs = recognise(_draw(page, OCR_SCALE, OCR_PIXELS), page.get_size(), ocr)
        boxes = lay_out(runs).boxes
    mask = Image.new("L", image.size)
    width, height = page.get_size()
    across, down = image.width / width, image.height / height
    for left, top, right, bottom in filter(None, boxes[start:end]):
        mask.paste(MARK_ALPHA, (round(left * across), round(top * down), round(right * across), round(bottom * down)))
    image.paste(MARK, mask=mask)
    return {"images": [_write_jpeg(image)]}


def _draw(page: Any, max_scale: float = MAX_SCALE, max_pixels: int = MAX_PIXELS) -> Any:
    width, height = page.get_size()
    bitmap = page.render(scale=min(max_scale, (max_pixels / (width * height)) ** 0.5))
    return bitmap.to_pil().convert("RGB")


def _write_jpeg(image: Any) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=QUALITY)
    return base64.b64encode(buffer.getvalue()).decode()
