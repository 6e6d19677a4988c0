"""DocumentReader: files in messages become their texts, and images of PDF pages without text."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from app.api.errors import refuse
from app.api.parts import make_text, make_unseen
from app.extraction.decoding import UnreadableSource, decode
from app.extraction.pdf import read_pdf
from app.extraction.reading import read_apart
from app.extraction.sources import OFFICE_TYPES, read_office

Json = dict[str, Any]
MAX_KEPT_CHARS = 32 * 2**20


class DocumentReader:
    """Reads files apart, and keeps the latest: agents send them again with every turn."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[bytes, bool], list[Json]] = OrderedDict()
        self._num_chars = 0

    async def read(self, message: Json, sees_images: bool) -> Json:
        """Return a message, which `read_message` has read, with the content of its files.

        Raises ApiError: 400 for a file that is not base64.
        """
        parts: list[Json] = []
        for part in message["content"]:
            parts += await self._read_part(part, sees_images) if part["type"] == "file" else [part]
        return message | {"content": parts}

    async def _read_part(self, part: Json, sees_images: bool) -> list[Json]:
        name, url = part["file"]["filename"], part["file"]["file_data"]
        key = (await read_apart("", _digest, name, url), sees_images)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        try:
            kind = ".pdf" if "application/pdf" in url[:40] else name
            parts = await read_apart(kind, _read_file, name, url, sees_images)
        except binascii.Error as error:
            raise refuse(part["where"], f" is not base64: {error}") from error
        self._num_chars += _count(parts) - _count(self._kept.get(key, ()))
        self._kept[key] = parts
        while self._num_chars > MAX_KEPT_CHARS:
            self._num_chars -= _count(self._kept.popitem(last=False)[1])
        return parts


def _digest(name: str, url: str) -> bytes:
    return hashlib.sha256(f"{name}\n{url}".encode()).digest()


def _read_file(name: str, url: str, sees_images: bool) -> list[Json]:
    """Return the parts of a file that is a data: URL or its base64 alone."""
    head, mark, data = url.rpartition(",")
    if mark and head.startswith("data:image/"):
        return [{"type": "image_url", "image_url": {"url": url}}]
    content = base64.b64decode(data, validate=True)
    try:
        if name.lower().endswith(OFFICE_TYPES):
            written, left_out = read_office(content, name)
            return [make_text(f"[{name}]\n" + "".join(f"[{note}]\n" for note in left_out) + written)]
        if not content.startswith(b"%PDF"):
            return [make_text(f"[{name}]\n{decode(content, name)}")]
        found = read_pdf(content, name, sees_images)
    except UnreadableSource as error:
        return [make_unseen(f"file {error}")]
    urls = [f"data:image/jpeg;base64,{base64.b64encode(image).decode()}" for image in found.images]
    notes = "".join(f"[{note}]\n" for note in found.notes)
    text = make_text(f"[{name}]\n{notes}" + "\n\n".join(filter(None, found.pages)))
    return [text, *({"type": "image_url", "image_url": {"url": each}} for each in urls)]


def _count(parts: Sequence[Json]) -> int:
    return sum(len(part.get("text") or part["image_url"]["url"]) for part in parts)
