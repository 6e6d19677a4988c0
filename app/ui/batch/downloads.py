"""The files of a batch that a person downloads, one of each format."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.utils import get_upload_folder

from app.extraction.export import FORMATS, ExportError, export

FILE_NAMES = {"jsonl": "JSONL", "csv": "CSV", "xlsx": "Excel", "parquet": "Parquet"}
MAX_SLUG_CHARS = 60


def make_slug(name: str) -> str:
    """Return a name as a part of a file name: without spaces, signs and slashes."""
    return re.sub(r"[^\w.-]+", "-", name).strip("-.")[:MAX_SLUG_CHARS]


def label(file_format: str) -> str:
    return f"Download {FILE_NAMES[file_format]}"


def write_files(records: list[dict[str, Any]], document: str = "") -> tuple[list[Any], str]:
    """Write the records in each format, in files named after the document.

    Returns what the download buttons show, and why some have no file.
    """
    # In Gradio's own folder, from which old files are deleted.
    root = Path(get_upload_folder())
    root.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="batch-", dir=root))
    buttons, reasons = [], []
    for file_format in FORMATS:
        path = folder / f"{document}-records.{file_format}".removeprefix("-")
        try:
            path.write_bytes(export(records, file_format))
            # An earlier failure disabled the button.
            buttons.append(gr.update(visible=True, interactive=True, value=str(path)))
        except ExportError as error:
            buttons.append(gr.update(visible=True, interactive=False, value=None))
            reasons.append(f"No {FILE_NAMES[file_format]} file: {error}.")
    return buttons, " ".join(reasons)
