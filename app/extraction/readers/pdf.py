"""Reads a PDF: the text of its pages by their layout, with fields and annotations, and pages as images.

The answer of `read_pages` has a text and packed boxes for each page, images in base64, numbers of pages by what
is to be said of them, and the names of attachments; or {"refused": reason}.
"""

from __future__ import annotations

import base64
import io
import math
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
# A picture of that share of a page, with fewer characters drawn over it, may be a scan with a stamp.
MIN_PICTURE, MAX_STAMP_CHARS = 0.1, 200
MAX_DEPTH = 4  # of forms around a picture
MIN_CONFIDENCE = 60  # of a word in such a picture, in percent: photographs look like some
MAX_UNMAPPED = 0.05  # share of the characters of a page without a letter, from which on OCR reads it instead
UNMAPPED = "\ufffd"
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
        is_unmapped = code != 32 and pdfium.FPDFText_HasUnicodeMapError(raw, index) == 1
        if code < 33 and code not in HYPHENS and not is_unmapped:
            has_space, last = True, None if code in (10, 13) else last
            continue
        if 0xDC00 <= code < 0xE000 and runs and 0xD800 <= (high := ord(runs[-1].text[-1])) < 0xDC00:
            runs[-1].text[-1] = chr(0x10000 + (high - 0xD800) * 0x400 + code - 0xDC00)
            continue
        text = UNMAPPED if is_unmapped else "-" if code in HYPHENS else chr(code)
        if text.isspace():
            has_space = True
            continue
        pdfium.FPDFText_GetLooseCharBox(raw, index, byref(rect))
        box = turn(rect.left, rect.bottom, rect.right, rect.top)
        if last is None or not runs[-1].follows(last, box):
            clockwise = pdfium.FPDFText_GetCharAngle(raw, index) + angle
            runs.append(Run(box, is_turned=abs(math.sin(clockwise)) > 0.5, slope=-math.tan(clockwise)))
        elif has_space:
            runs[-1].text.append(" ")
            runs[-1].boxes.append(None)
        runs[-1].add(text, box)
        last, has_space = box, False
    for run in runs:
        run.text = [UNMAPPED if "\ud800" <= text <= "\udfff" else text for text in run.text]
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
    names = ("pages", "boxes", "images", "recognised", "unread", "unmapped")
    found: dict[str, list[Any]] = {name: [] for name in names}
    num_silent = 0  # pages without a letter
    for number in range(len(document)):
        page = _open_page(document, number)
        try:
            runs = [] if page is None else read_runs(page, document.formenv, max_chars)
        except ValueError:
            return {"refused": f"has more than {max_chars:,} characters of text on a page or in all: split it"}
        pictures = [] if page is None else _find_unread(page, runs)
        num_silent += bool(pictures) and not runs
        if num_silent > max_images > 0:
            return {"refused": f"has more than {max_images} pages without text: split it"}
        if pictures and max_images and (number < max_images or not runs):
            image = _draw(page, OCR_SCALE, OCR_PIXELS) if ocr else _draw(page)
            if ocr:
                seen = _recognise(page, image, runs, pictures, ocr)
                found["recognised"] += [number + 1] * (seen != runs)
                runs = seen
            else:
                found["images"].append(_write_jpeg(image))
        elif pictures and not _lacks_letters(runs):
            found["unread"].append(number + 1)
        laid_out = lay_out(runs)
        text = "".join(laid_out.text)
        max_chars -= len(text)
        found["unmapped"] += [number + 1] * (UNMAPPED in text)
        found["pages"].append(text)
        found["boxes"].append(pack_words(laid_out))
    attachments = [document.get_attachment(each).get_name() for each in range(document.count_attachments())]
    return {**found, "attachments": attachments}


def _lacks_letters(runs: Sequence[Run]) -> bool:
    signs = [sign for run in runs for sign in run.text]
    return not signs or signs.count(UNMAPPED) > MAX_UNMAPPED * len(signs)


def _find_unread(page: Any, runs: Sequence[Run]) -> list[Box]:
    """Return the boxes of what may be text in pictures: large images, or the whole page if it lacks letters."""
    width, height = page.get_size()
    if _lacks_letters(runs):
        is_blank = not runs and all(low == high for low, high in _draw(page).getextrema())
        return [] if is_blank else [(0.0, 0.0, width, height)]
    turn = _make_turn(page)
    found = []
    for each in page.get_objects([pdfium.FPDF_PAGEOBJ_IMAGE], max_depth=MAX_DEPTH):
        left, top, right, bottom = turn(*each.get_bounds())
        box = (max(left, 0.0), max(top, 0.0), min(right, width), min(bottom, height))
        size = max(box[2] - box[0], 0.0) * max(box[3] - box[1], 0.0)
        num_chars = sum(len(run.text) for run in runs if _overlaps(run.box, box))
        if size >= MIN_PICTURE * width * height and num_chars <= MAX_STAMP_CHARS:
            found.append(box)
    return found


def _overlaps(one: Box, other: Box) -> bool:
    return min(one[2], other[2]) > max(one[0], other[0]) and min(one[3], other[3]) > max(one[1], other[1])


def _recognise(page: Any, image: Any, runs: list[Run], pictures: Sequence[Box], ocr: Sequence[str]) -> list[Run]:
    """Return the runs of a page with those that OCR reads in its pictures, or these alone if the page lacks letters."""
    if _lacks_letters(runs):
        return recognise(image, page.get_size(), ocr) or runs
    seen = recognise(image, page.get_size(), ocr, MIN_CONFIDENCE)
    inside = [run for run in seen if any(_overlaps(run.box, box) for box in pictures)]
    return [*runs, *(run for run in inside if not any(_overlaps(run.box, other.box) for other in runs))]


def _open_page(document: Any, number: int) -> Any:
    """Return a page, or None for a damaged one."""
    try:
        return document[number]
    except pypdfium2.PdfiumError:
        return None


def render_page(data: bytes, number: int, boxes: Sequence[Box]) -> dict[str, Any]:
    """Return the image of a page, counted from 0, with places highlighted."""
    document = pypdfium2.PdfDocument(data)
    document.init_forms()
    page = document[number]
    image = _draw(page)
    mask = Image.new("L", image.size)
    width, height = page.get_size()
    across, down = image.width / width, image.height / height
    for left, top, right, bottom in boxes:
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
