"""The files of a batch that a person downloads, one of each format."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.utils import get_upload_folder

from app.extraction.export import FORMATS, ExportError, export

FILE_NAMES = {"jsonl": "JSONL", "csv": "CSV", "xlsx": "Excel", "parquet": "Parquet"}


def label(file_format: str) -> str:
    return f"Download {FILE_NAMES[file_format]}"


def write_files(records: list[dict[str, Any]], document: str = "") -> list[Any]:
    """Write the records in each format, in files named after the document; returns what the download buttons show."""
    # In Gradio's own folder, from which old files are deleted.
    root = Path(get_upload_folder())
    root.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="batch-", dir=root))
    buttons = []
    for file_format in FORMATS:
        path = folder / f"{document}-records.{file_format}".removeprefix("-")
        try:
            path.write_bytes(export(records, file_format))
            # An earlier failure disabled the button and changed its label.
            buttons.append(gr.update(visible=True, interactive=True, value=str(path), label=label(file_format)))
        except ExportError as error:
            buttons.append(gr.update(visible=True, interactive=False, value=None, label=str(error)))
    return buttons
