"""Files in a chat: texts are written into the message in a fence of their own, images travel beside it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gradio.processing_utils import get_upload_folder

from app.extraction.decoding import decode
from app.extraction.reading import read_apart
from app.extraction.sources import (
    IMAGE_TYPES,
    MAX_IMAGE_BYTES,
    OFFICE_TYPES,
    UnreadableSource,
    read_bytes,
    read_text,
)
from engine import InvalidRequest

FILE_TYPES = ["text", ".md", ".csv", ".json", ".jsonl", ".log", ".xml", ".py", ".pdf", *OFFICE_TYPES]
MAX_BYTES = 4 * 2**20


async def add_attachments(text: str, paths: Iterable[str | Path]) -> str:
    """The message with the files' texts behind it.

    Raises InvalidRequest: a file cannot be read as text; the message names it.
    """
    parts = [text.strip()] if text.strip() else []
    for path in map(Path, paths):
        parts.append(f"{path.name}\n{fence(await read_apart(path, read_attachment, path))}")
    return "\n\n".join(parts)


def read_attachment(path: Path) -> str:
    """The text of one file."""
    try:
        if path.suffix.lower() in (".html", ".htm"):  # its source, about which people ask
            return decode(read_bytes(path, path.name, MAX_BYTES), path.name)
        return read_text(path, MAX_BYTES)
    except UnreadableSource as error:
        raise InvalidRequest(str(error), "attachment") from error


def is_image(path: str | Path) -> bool:
    return Path(path).suffix.lower() in IMAGE_TYPES


def load_images(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the model's messages with the content of image files in the place of their paths.

    Raises InvalidRequest: a file is gone or too large.
    """
    return [
        message
        if isinstance(message["content"], str)
        else message | {"content": [_load_part(part) for part in message["content"]]}
        for message in messages
    ]


def _load_part(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] != "image":
        return part
    path = Path(part["path"]).resolve()
    # The path comes back from the browser, so it is read only where Gradio keeps uploaded files.
    if not path.is_relative_to(Path(get_upload_folder()).resolve()) or not path.is_file():
        raise InvalidRequest(f"{path.name} is no longer on the server; attach it again", "attachment")
    if path.stat().st_size > MAX_IMAGE_BYTES:
        raise InvalidRequest(f"{path.name} is larger than {MAX_IMAGE_BYTES >> 20} MiB", "attachment")
    return {"type": "image", "image": path.read_bytes()}


def fence(text: str) -> str:
    """The text between fences that it does not contain itself."""
    longest = max((len(run) for run in re.findall(r"`{3,}", text)), default=2)
    mark = "`" * (longest + 1)
    return f"{mark}\n{text.rstrip()}\n{mark}"
