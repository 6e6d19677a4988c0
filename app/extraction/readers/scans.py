"""Reads the text of pictures by Tesseract, laid out as other pages are, without the lines of tables.

The answer of `read_image` is {"text": text, "boxes": base64}, in pixels.
"""

from __future__ import annotations

import io
import os
import subprocess
from collections.abc import Sequence
from typing import Any

from PIL import Image, ImageChops

from .layout import MAX_GAP, Run, lay_out, pack_words

OCR_LAYOUT = ("--psm", "4")  # lines across the whole page: `lay_out` finds the columns itself
RULE_LENGTH, RULE_THICKNESS = 0.06, 0.006  # of a table's lines, as shares of the shorter side of the page
MIN_SIGN_CONFIDENCE = 60  # of a word without letters and digits, in percent: rests of lines look like such
MIN_SLOPED = 8  # heights of a line between words that show how it slopes
DARK, WHITE = 160, 255


def read_image(data: bytes, ocr: Sequence[str]) -> dict[str, Any]:
    """Return the text of a picture, and the boxes of its words in pixels."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    found = lay_out(recognise(image, image.size, ocr))
    return {"text": "".join(found.text), "boxes": pack_words(found)}


def recognise(
    image: Any, size: tuple[float, float], ocr: Sequence[str], min_confidence: float = 0
) -> list[Run]:
    """Return the lines that Tesseract reads in the image of a page, with boxes in the page's points.

    Args:
        size: width and height of the page.
        ocr: Tesseract's command; it reads a PNG and writes a table with a line for each word.
        min_confidence: of a word that is kept, in percent.
    """
    buffer = io.BytesIO()
    _erase_rules(image).save(buffer, "PNG", compress_level=1)
    command = [*ocr, *OCR_LAYOUT, "stdin", "stdout", "tsv"]
    # More threads take twice the processor time for the same page.
    alone = os.environ | {"OMP_THREAD_LIMIT": "1"}
    found = subprocess.run(command, input=buffer.getvalue(), capture_output=True, check=True, env=alone)
    across, down = size[0] / image.width, size[1] / image.height
    runs: list[Run] = []
    lines: dict[tuple[str, ...], list[tuple[float, float, int]]] = {}  # middles of words, and their runs
    before: tuple[list[str], float] | None = None  # the line of the word before, and where that ends
    for row in found.stdout.decode("utf-8", "replace").splitlines()[1:]:
        level, *place, _, left, top, width, height, confidence, text = row.split("\t", 11)
        is_noise = float(confidence) < MIN_SIGN_CONFIDENCE and not any(map(str.isalnum, text))
        if level != "5" or is_noise or float(confidence) < min_confidence or not text.strip():
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
        lines.setdefault(tuple(place), []).append((x + (right - x) / 2, y + int(height) * down / 2, len(runs) - 1))
    for words in lines.values():
        (x1, y1, _), (x2, y2, _) = words[0], words[-1]
        for *_, index in words:
            # The slope of a line of a few letters is none.
            runs[index].slope = (y1 - y2) / (x2 - x1) if x2 - x1 > MIN_SLOPED * runs[index].height else 0.0
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
