"""Files in a chat: a text becomes a message behind its question, images travel in the question."""

from __future__ import annotations

import secrets
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
from app.ui.chat.conversation import History, file_message, is_file, list_image_paths
from engine import InvalidRequest

TEXT_TYPES = (".txt", ".md", ".csv", ".json", ".jsonl", ".log", ".xml", ".py")
FILE_TYPES = ["text", *TEXT_TYPES, ".pdf", *OFFICE_TYPES]
MAX_BYTES = 4 * 2**20


async def read_files(paths: Iterable[str | Path]) -> History:
    """Return a message for each file, with its text.

    Raises InvalidRequest: a file cannot be read as text; the message names it.
    """
    return [file_message(path.name, await read_apart(path, read_attachment, path)) for path in map(Path, paths)]


def write_files(messages: History) -> list[str]:
    """Write the files of a question again, and return their paths and those of its images."""
    folder = Path(get_upload_folder()) / secrets.token_hex(16)
    folder.mkdir(parents=True)
    paths = [path for message in messages for path in list_image_paths(message["content"]) if Path(path).is_file()]
    for message in filter(is_file, messages):
        # Its text is all that was kept, so a PDF comes back as a text.
        name = Path(message["metadata"]["title"]).name
        path = folder / (name if Path(name).suffix in TEXT_TYPES else f"{name}.txt")
        path.write_text(message["content"], encoding="utf-8")
        paths.append(str(path))
    return paths


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
