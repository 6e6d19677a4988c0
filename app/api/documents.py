"""DocumentReader: files in messages become their texts, and images of PDF pages without text."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from app.api.errors import BadRequest
from app.api.fields import field_of
from app.api.parts import make_text, make_unseen, read_part
from app.extraction.decoding import UnreadableSource, decode
from app.extraction.pdf import read_pdf
from app.extraction.reading import read_apart

Json = dict[str, Any]
FILE_TYPES = ("file", "input_file", "document")
MAX_KEPT_CHARS = 32 * 2**20


class DocumentReader:
    """Reads files apart, and keeps the latest: agents send them again with every turn."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[bytes, bool], list[Json]] = OrderedDict()
        self._num_chars = 0

    async def read(self, messages: Sequence[Json], sees_images: bool) -> Sequence[Json]:
        """Return the messages with the content of their files.

        Raises:
            ApiError: 400 for a file that is not base64.
        """
        return [await self._read_message(f"messages[{i}]", each, sees_images) for i, each in enumerate(messages)]

    async def _read_message(self, where: str, message: Json, sees_images: bool) -> Json:
        content = message.get("content")
        if not isinstance(content, list) or not any(map(_is_file, content)):
            return message
        parts: list[Json] = []
        for i, part in enumerate(content):
            place = f"{where}.content[{i}]"
            is_history = message.get("role") != "user"
            for one in read_part(place, part, is_history) if _is_file(part) else [part]:
                parts += await self._read_part(place, one, sees_images) if _is_file(one) else [one]
        return message | {"content": parts}

    async def _read_part(self, where: str, part: Json, sees_images: bool) -> list[Json]:
        name, url = part["file"]["filename"], part["file"]["file_data"]
        key = await read_apart("", _digest, name, url), sees_images
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        is_pdf = "application/pdf" in url[:40] or name.lower().endswith(".pdf")
        try:
            parts = await read_apart(".pdf" if is_pdf else "", _read_file, name, url, sees_images)
        except binascii.Error as error:
            raise BadRequest(f"{where} is not base64: {error}", field_of(where)) from error
        self._num_chars += _count(parts) - _count(self._kept.get(key, ()))
        self._kept[key] = parts
        while self._num_chars > MAX_KEPT_CHARS:
            self._num_chars -= _count(self._kept.popitem(last=False)[1])
        return parts


def _digest(name: str, url: str) -> bytes:
    return hashlib.sha256(f"{name}\n{url}".encode()).digest()


def _is_file(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") in FILE_TYPES


def _read_file(name: str, url: str, sees_images: bool) -> list[Json]:
    """Return the parts of a file that is a data: URL or its base64 alone."""
    head, mark, data = url.rpartition(",")
    if mark and head.startswith("data:image/"):
        return [{"type": "image_url", "image_url": {"url": url}}]
    content = base64.b64decode(data, validate=True)
    try:
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
