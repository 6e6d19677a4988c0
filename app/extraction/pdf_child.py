"""Reads a PDF in a process of its own (child_main.py): the text of its pages by their layout, and pages as images.

The answer is {"pages": [text], "boxes": [base64], "images": [base64]} or {"refused": reason}.
Boxes are (left, top, right, bottom) in points as shown.
"""

from __future__ import annotations

import base64
import io
import math
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from ctypes import byref, c_ubyte
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

import pypdfium2
import pypdfium2.raw as pdfium
from PIL import Image, ImageChops

Box = tuple[float, float, float, float]
# A gap of that many heights of a line ends a cell; so wide a strip without text may separate columns.
MAX_GAP = 1.0
WORD_GAP = 0.2
# Runs whose centres are that close, in heights of a line, stand on one line.
SAME_LINE = 0.6
# Columns of prose have at least so many lines, of that many heights and that share of the column.
MIN_PROSE_LINES, MIN_PROSE_WIDTH, MIN_PROSE_FILL = 3, 8, 0.6
MAX_GUTTERS = 8
MIN_CONTINUED = 0.2  # share of the lines of prose that go on with a small letter
NEAR_LINES = 100  # lines before and after a row that show how wide its columns are
WRAPPED_STEP = 1.25  # rows of a table stand at least so many times as far apart as the lines of a cell
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
OCR_LAYOUT = ("--psm", "4")  # lines across the whole page: `lay_out` finds the columns itself
RULE_LENGTH, RULE_THICKNESS = 0.06, 0.006  # of a table's lines, as shares of the shorter side of the page
MIN_SIGN_CONFIDENCE = 60  # of a word without letters and digits, in percent: rests of lines look like such
DARK, WHITE = 160, 255
QUALITY = 90
MARK = (15, 118, 110)  # the accent of the app
MARK_ALPHA = 80


@dataclass(slots=True)
class Run:
    """Characters side by side on a line, each with its box; spaces have none."""

    box: Box
    text: list[str] = field(default_factory=list)
    boxes: list[Box | None] = field(default_factory=list)
    is_turned: bool = False
    is_field: bool = False

    @property
    def height(self) -> float:
        return max(self.box[3] - self.box[1], 1.0)

    @property
    def centre(self) -> float:
        return (self.box[1] + self.box[3]) / 2

    def add(self, text: str, box: Box) -> None:
        """Append a character, or the whole text of a field."""
        self.text += text
        self.boxes += [box] * len(text)
        left, top, right, bottom = self.box
        self.box = (min(left, box[0]), min(top, box[1]), max(right, box[2]), max(bottom, box[3]))

    def follows(self, last: Box, box: Box) -> bool:
        """Return whether a character stands beside the last one."""
        side, across = (1, 0) if self.is_turned else (0, 1)
        size = min(last[across + 2] - last[across], box[across + 2] - box[across])
        overlap = min(last[across + 2], box[across + 2]) - max(last[across], box[across])
        gap = max(box[side] - last[side + 2], last[side] - box[side + 2])
        return overlap >= 0.4 * size and gap <= MAX_GAP * max(size, 1.0)


@dataclass(slots=True)
class PageText:
    """The text of a page with the box of each character."""

    text: list[str] = field(default_factory=list)
    boxes: list[Box | None] = field(default_factory=list)

    def add_line(self, runs: Sequence[Run]) -> None:
        """Append the runs of a line, from left to right."""
        self._add_space("\n" if self.text else "")
        for before, run in zip([None, *runs], runs, strict=False):
            if before is not None:
                gap = (run.box[0] - before.box[2]) / min(run.height, before.height)
                is_apart = gap > WORD_GAP or run.is_field or run.box[1] > before.centre
                self._add_space("  " if gap > MAX_GAP else " " if is_apart else "")
            self.text += run.text
            self.boxes += run.boxes

    def _add_space(self, text: str) -> None:
        self.text += text
        self.boxes += [None] * len(text)


def pack_words(page: PageText) -> str:
    """Return the offsets and the box of each word, as `app.extraction.boxes` reads them, in base64."""
    packed, start = [], 0
    for end, box in enumerate([*page.boxes, None]):
        if box is None:
            if start < end:
                lefts, tops, rights, bottoms = zip(*page.boxes[start:end], strict=True)  # type: ignore[arg-type]
                packed.append(struct.pack("<2i4f", start, end, min(lefts), min(tops), max(rights), max(bottoms)))
            start = end + 1
    return base64.b64encode(b"".join(packed)).decode()


def lay_out(runs: Sequence[Run]) -> PageText:
    """Write the runs of a page as it is read: rows from the top, columns of prose one after the other."""
    page = PageText()
    lines = _make_lines([run for run in runs if not run.is_turned])
    start = 0
    while start < len(lines):
        end, gutters = _find_gutters(lines, start)
        columns = [[line for line in column if line] for column in _split(lines[start:end], gutters)]
        if len(columns) > 1 and all(map(_is_prose, columns)):
            band = [line for column in columns for line in column]
        else:
            band = _join_wrapped(lines[start:end])
        for line in band:
            page.add_line(line)
        start = end
    for run in runs:
        if run.is_turned:
            page.add_line([run])
    return page


def _make_lines(runs: list[Run]) -> list[list[Run]]:
    lines: list[list[Run]] = []
    for run in sorted(runs, key=lambda run: run.centre):
        first = lines[-1][0] if lines else None
        if first and abs(run.centre - first.centre) <= SAME_LINE * min(run.height, first.height):
            lines[-1].append(run)
        else:
            lines.append([run])
    return [sorted(line, key=lambda run: run.box[0]) for line in lines]


def _find_gutters(lines: list[list[Run]], start: int) -> tuple[int, list[tuple[float, float]]]:
    """Return the end of the lines that leave the same vertical strips free as the first one, and the strips."""
    first = lines[start]
    width = MAX_GAP * median(run.height for run in first)
    gaps = ((one.box[2], two.box[0]) for one, two in pairwise(first))
    gutters = _keep_widest([gap for gap in gaps if gap[1] - gap[0] >= width])
    end = start + 1
    while gutters and end < len(lines):
        left = [part for gutter in gutters for part in _clear(gutter, lines[end], width)]
        if not left:
            break
        gutters, end = _keep_widest(left), end + 1
    return end, gutters


def _join_wrapped(lines: list[list[Run]]) -> list[list[Run]]:
    """Return the rows of a table: lines closer together than others are one row if they fit as wrapped cells."""
    heights = [median(run.centre for run in line) for line in lines]
    steps = [two - one for one, two in pairwise(heights)]
    if not steps or max(steps) <= WRAPPED_STEP * min(steps):
        return lines
    starts = [0, *(number for number, step in enumerate(steps, 1) if step > WRAPPED_STEP * min(steps)), len(lines)]
    rows = []
    for start, end in pairwise(starts):
        fullest = max(lines[start:end], key=len)
        gutters = [(one.box[2], two.box[0]) for one, two in pairwise(fullest)]
        for line in lines[start:end]:
            gutters = [part for gutter in gutters for part in _clear(gutter, line, 0)]
        first = max(0, start - NEAR_LINES)
        columns = _split(lines[first : end + NEAR_LINES], gutters)
        inside = range(start - first, end - first)
        num_cells = [sum(bool(column[number]) for column in columns) for number in inside]
        if len(columns) != len(fullest) or num_cells.count(len(columns)) != 1:
            return lines  # cells that overlap those below, or several full rows
        edges = [*(high for _, high in gutters), math.inf]
        if not all(_is_wrapped(column, inside, edge) for column, edge in zip(columns, edges, strict=True)):
            return lines
        rows.append([run for column in columns for number in inside for run in column[number]])
    return rows


def _is_wrapped(column: list[list[Run]], inside: range, edge: float) -> bool:
    """Return whether each line of a row in a column begins with a word for which the line above has no room."""
    cells = [cell for cell in column if cell and cell[-1].box[2] <= edge]
    width = max((cell[-1].box[2] - cell[0].box[0] for cell in cells), default=0)
    for above, line in pairwise(filter(None, column[inside.start : inside.stop])):
        first = "".join(line[0].text).partition(" ")[0]
        boxes = [box for box in line[0].boxes[: len(first)] if box]
        if above[-1].box[2] - above[0].box[0] + boxes[-1][2] - boxes[0][0] + WORD_GAP * line[0].height <= width:
            return False
    return True


def _keep_widest(gutters: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return as many strips as columns of prose may have, so that a page of thousands takes linear time."""
    return sorted(sorted(gutters, key=lambda gutter: gutter[0] - gutter[1])[:MAX_GUTTERS])


def _clear(gutter: tuple[float, float], line: list[Run], width: float) -> Iterator[tuple[float, float]]:
    """Yield the parts of a strip that are wide enough beside the runs of a line."""
    low, high = gutter
    for run in line:
        if run.box[2] > low and run.box[0] < high:
            if run.box[0] - low >= width:
                yield low, run.box[0]
            low = max(low, run.box[2])
    if high - low >= width:
        yield low, high


def _split(lines: list[list[Run]], gutters: list[tuple[float, float]]) -> list[list[list[Run]]]:
    """Return the lines of each column between the gutters."""
    edges = [-math.inf, *(low for low, _ in gutters), math.inf]
    return [[[run for run in line if low <= run.box[0] < high] for line in lines] for low, high in pairwise(edges)]


def _is_prose(lines: list[list[Run]]) -> bool:
    """Return whether lines of a column go on in the next one, rather than in the column beside."""
    if len(lines) < MIN_PROSE_LINES:
        return False
    widths = [line[-1].box[2] - line[0].box[0] for line in lines]
    width = max(line[-1].box[2] for line in lines) - min(line[0].box[0] for line in lines)
    starts = [sign for line in lines if (sign := line[0].text[0]).isdigit() or sign.lower() != sign.upper()]
    is_continued = len(starts) < MIN_PROSE_LINES or (sum(map(str.islower, starts)) >= MIN_CONTINUED * len(starts))
    height = median(line[0].height for line in lines)
    return is_continued and median(widths) >= max(MIN_PROSE_FILL * width, MIN_PROSE_WIDTH * height)


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
    is_text = kind == pdfium.FPDF_FORMFIELD_TEXTFIELD and not flags & PASSWORD
    if is_text or kind in (pdfium.FPDF_FORMFIELD_COMBOBOX, pdfium.FPDF_FORMFIELD_LISTBOX):
        value = _read_string(lambda *room: pdfium.FPDFAnnot_GetFormFieldValue(form, annotation, *room))
        return value, bool(flags & MULTILINE)
    return "", False


def _read_contents(annotation: Any) -> str:
    return _read_string(lambda *room: pdfium.FPDFAnnot_GetStringValue(annotation, b"Contents", *room))


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


def read_image(data: bytes, ocr: Sequence[str]) -> dict[str, Any]:
    """Return the text of a picture, and the boxes of its words in pixels."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    found = lay_out(recognise(image, image.size, ocr))
    return {"text": "".join(found.text), "boxes": pack_words(found)}


def recognise(image: Any, size: tuple[float, float], ocr: Sequence[str]) -> list[Run]:
    """Return the lines that Tesseract reads in the image of a page, with boxes in the page's points.

    Args:
        size: width and height of the page.
        ocr: Tesseract's command; it reads a PNG and writes a table with a line for each word.
    """
    buffer = io.BytesIO()
    _erase_rules(image).save(buffer, "PNG", compress_level=1)
    command = [*ocr, *OCR_LAYOUT, "stdin", "stdout", "tsv"]
    # More threads take twice the processor time for the same page.
    alone = os.environ | {"OMP_THREAD_LIMIT": "1"}
    found = subprocess.run(command, input=buffer.getvalue(), capture_output=True, check=True, env=alone)
    across, down = size[0] / image.width, size[1] / image.height
    runs: list[Run] = []
    before: tuple[list[str], float] | None = None  # the line of the word before, and where that ends
    for row in found.stdout.decode("utf-8", "replace").splitlines()[1:]:
        level, *place, _, left, top, width, height, confidence, text = row.split("\t", 11)
        is_noise = float(confidence) < MIN_SIGN_CONFIDENCE and not any(map(str.isalnum, text))
        if level != "5" or is_noise or not text.strip():
            continue
        x, y, right = int(left) * across, int(top) * down, (int(left) + int(width)) * across
        box = (x, y, right, y + int(height) * down)
        if before is None or before[0] != place or x - before[1] > MAX_GAP * runs[-1].height:
            runs.append(Run(box))
        else:
            runs[-1].text.append(" ")
            runs[-1].boxes.append(None)
        each = (right - x) / len(text)
        for index, sign in enumerate(text):
            runs[-1].add(sign, (x + index * each, box[1], x + (index + 1) * each, box[3]))
        before = place, right
    return runs


def _erase_rules(image: Any) -> Any:
    """Return an image in grey without the thin lines of tables, because of which Tesseract skips rows."""
    grey = image.convert("L")
    length, thickness = (max(2, round(share * min(grey.size))) for share in (RULE_LENGTH, RULE_THICKNESS))
    if min(grey.size) < length:
        return grey
    dark = grey.point(lambda value: WHITE * (value < DARK))
    for _ in ("horizontal", "vertical"):
        thick = _find_runs(dark.transpose(Image.Transpose.TRANSPOSE), thickness).transpose(Image.Transpose.TRANSPOSE)
        rules = ImageChops.subtract(_find_runs(dark, length), thick)
        grey.paste(WHITE, mask=rules)
        dark = ImageChops.subtract(dark, rules)
        grey, dark = (each.transpose(Image.Transpose.TRANSPOSE) for each in (grey, dark))
    return grey


def _find_runs(marked: Any, length: int) -> Any:
    """Return the marked pixels in horizontal runs of at least that length, by doubling it."""
    steps, size = [], 1
    while size < length:
        steps.append(min(size, length - size))
        size += steps[-1]
    for step in steps:
        width, height = marked.size
        marked = ImageChops.darker(marked.crop((step, 0, width, height)), marked.crop((0, 0, width - step, height)))
    for step in steps:
        width, height = marked.size
        marked = ImageChops.lighter(marked.crop((0, 0, width + step, height)), marked.crop((-step, 0, width, height)))
    return marked


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
