"""Pages of a PDF as JPEG images: reads a line of JSON, what is asked, and then the file from stdin.

It is a process of its own, as pdf_text.py is, because a damaged file may crash or block the renderer. It writes
{"images": [base64, ...]} or {"refused": reason} as JSON.
"""

from __future__ import annotations

import base64
import io
import json
import signal
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any

import pypdfium2
from PIL import Image

MAX_SCALE = 2.0  # pixels per point: 144 dots per inch
MAX_PIXELS = 2**21  # of a page: A4 at that scale
QUALITY = 90
MARK = (15, 118, 110)  # the accent of the app
MARK_ALPHA = 80


def render_pages(
    data: bytes, numbers: Sequence[int], max_images: int, mark: str = "", place: int = 0
) -> dict[str, Any]:
    """Return pages, counted from 0, without those of one colour; or the reason why the file is refused.

    Args:
        mark: text without spaces to highlight on each page.
        place: how many equal texts precede it.
    """
    document = pypdfium2.PdfDocument(data)
    images: list[str] = []
    for number in numbers:
        page = document[number]
        width, height = page.get_size()
        bitmap = page.render(scale=min(MAX_SCALE, (MAX_PIXELS / (width * height)) ** 0.5))
        image = bitmap.to_pil().convert("RGB")
        if all(low == high for low, high in image.getextrema()):
            continue
        if len(images) == max_images:
            return {"refused": f"has more than {max_images} pages without text: split it"}
        if mark:
            highlight(image, _find_boxes(page, bitmap, mark, place))
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=QUALITY)
        images.append(base64.b64encode(buffer.getvalue()).decode())
    return {"images": images}


def _find_boxes(page: Any, bitmap: Any, mark: str, place: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield the boxes of a text's characters in pixels; of the last equal text if there are fewer."""
    text_page = page.get_textpage()
    letters: list[tuple[str, int]] = []
    for index in range(text_page.count_chars()):
        code = pypdfium2.raw.FPDFText_GetUnicode(text_page.raw, index)
        letters += [(each, index) for each in unicodedata.normalize("NFKC", chr(code)) if not each.isspace()]
    text = "".join(letter for letter, _ in letters)
    start = found = text.find(mark)
    while place and found >= 0:
        place, found = place - 1, text.find(mark, found + len(mark))
        start = max(start, found)
    if start < 0:
        return
    position = bitmap.get_posconv(page)
    for _, index in letters[start : start + len(mark)]:
        left, bottom, right, top = text_page.get_charbox(index, loose=True)
        corners = (position.to_bitmap(left, bottom), position.to_bitmap(right, top))
        (x1, x2), (y1, y2) = (sorted(axis) for axis in zip(*corners, strict=True))
        yield x1, y1, x2, y2


def highlight(image: Image.Image, boxes: Iterator[tuple[int, int, int, int]]) -> None:
    """Colour these boxes of an image."""
    mask = Image.new("L", image.size)
    for box in boxes:
        mask.paste(MARK_ALPHA, box)
    image.paste(MARK, mask=mask)


if __name__ == "__main__":
    asked = json.loads(sys.stdin.buffer.readline())
    # The server ends this process in time; the alarm does when the server itself was killed.
    signal.alarm(asked.pop("max_seconds"))
    json.dump(render_pages(sys.stdin.buffer.read(), **asked), sys.stdout)
