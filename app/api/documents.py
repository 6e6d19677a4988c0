"""DocumentReader: files in messages, or of /v1/files, become their texts, and images of PDF pages without text."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from app.api.errors import refuse
from app.api.parts import make_text, make_unseen
from app.extraction.decoding import UnreadableSource, decode
from app.extraction.pdf import read_pdf
from app.extraction.reading import read_apart
from app.extraction.sources import OFFICE_TYPES, read_office
from app.store import Connection, Store, objects

Json = dict[str, Any]
MAX_KEPT_CHARS = 32 * 2**20
# media type of an image -> how its content begins
IMAGES = {"image/png": rb"\x89PNG\r\n", "image/jpeg": rb"\xff\xd8\xff", "image/webp": rb"(?s:RIFF....WEBP)"}


class DocumentReader:
    """Reads files apart, and keeps the latest: agents send them again with every turn."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._kept: OrderedDict[tuple[bytes, bool], list[Json]] = OrderedDict()
        self._num_chars = 0

    async def read(self, message: Json, sees_images: bool, owner: str) -> Json:
        """Return a message, which `read_message` has read, with the content of its files.

        Args:
            owner: whose stored files it may name.

        Raises ApiError: 400 for a file that is not base64, and for one of a user that is not stored.
        """
        parts: list[Json] = []
        for part in message["content"]:
            if part["type"] != "file":
                parts.append(part)
            elif (file_id := part["file"].get("file_id")) is None:
                parts += await self._read_part(part, part["file"]["filename"], part["file"]["file_data"], sees_images)
            elif found := await self._store.run(_load, owner, file_id):
                parts += await self._read_part(part, *found, sees_images)
            elif message["role"] == "user":
                raise refuse(part["where"], f": there is no file {file_id[:80]!r} with a content", "file_not_found")
            else:  # an error would end the conversation, which has this part from now on
                parts.append(make_unseen(f"file {file_id[:80]}"))
        return message | {"content": parts}

    async def _read_part(self, part: Json, name: str, data: str | bytes, sees_images: bool) -> list[Json]:
        key = (await read_apart("", _digest, name, data), sees_images)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        try:
            is_pdf = "application/pdf" in data[:40] if isinstance(data, str) else data.startswith(b"%PDF")
            parts = await read_apart(".pdf" if is_pdf else name, _read_file, name, data, sees_images)
        except binascii.Error as error:
            raise refuse(part["where"], f" is not base64: {error}") from error
        self._num_chars += _count(parts) - _count(self._kept.get(key, ()))
        self._kept[key] = parts
        while self._num_chars > MAX_KEPT_CHARS:
            self._num_chars -= _count(self._kept.popitem(last=False)[1])
        return parts


def _load(db: Connection, owner: str, file_id: str) -> tuple[str, bytes] | None:
    """Return the name and the content of a stored file."""
    file, data = objects.get(db, owner, "file", file_id), objects.get_data(db, owner, "file", file_id)
    return None if file is None or data is None else (file.body["filename"], data)


def _digest(name: str, data: str | bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\n" + (data.encode() if isinstance(data, str) else data)).digest()


def _read_file(name: str, data: str | bytes, sees_images: bool) -> list[Json]:
    """Return the parts of a file: its bytes, or a data: URL, or its base64 alone."""
    if isinstance(data, str):
        head, mark, encoded = data.rpartition(",")
        if mark and head.startswith("data:image/"):
            return [{"type": "image_url", "image_url": {"url": data}}]
        content = base64.b64decode(encoded, validate=True)
    else:
        content = data
    if media_type := next((kind for kind, start in IMAGES.items() if re.match(start, content)), None):
        return [_make_image(media_type, content)]
    try:
        if name.lower().endswith(OFFICE_TYPES):
            written, left_out = read_office(content, name)
            return [make_text(f"[{name}]\n" + "".join(f"[{note}]\n" for note in left_out) + written)]
        if not content.startswith(b"%PDF"):
            return [make_text(f"[{name}]\n{decode(content, name)}")]
        found = read_pdf(content, name, sees_images)
    except UnreadableSource as error:
        return [make_unseen(f"file {error}")]
    notes = "".join(f"[{note}]\n" for note in found.notes)
    text = make_text(f"[{name}]\n{notes}" + "\n\n".join(filter(None, found.pages)))
    return [text, *(_make_image("image/jpeg", each) for each in found.images)]


def _make_image(media_type: str, content: bytes) -> Json:
    url = f"data:{media_type};base64,{base64.b64encode(content).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def _count(parts: Sequence[Json]) -> int:
    return sum(len(part.get("text") or part["image_url"]["url"]) for part in parts)
