"""Saving the record on the page as a JSON, CSV or Excel file."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import gradio as gr

from app.extraction.export import ExportError, export
from app.ui.extract.shown import Shown

# A file as `save_record` made it, into the folder of downloads.
SAVE = """({ name, data }) => {
const link = document.createElement("a");
link.href = URL.createObjectURL(new Blob([Uint8Array.from(atob(data), (char) => char.charCodeAt(0))]));
link.download = name;
link.click();
setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}"""
FILE_FORMATS = {"json": "Save JSON", "csv": "Save CSV", "xlsx": "Save Excel"}


def save_record(file_format: str, shown: Shown | None) -> dict[str, str]:
    """Return the record as it was corrected, with the model that read it, as the name and the content of a file."""
    if shown is None:
        raise gr.Error("There is no record yet: extract one first.", print_exception=False)
    result, about = shown.result, {"source": shown.result.source, "model": shown.model, "approved": shown.is_approved}
    try:
        if file_format == "json":
            saved = about | {"to_check": shown.to_check, "record": result.record}
            content = f"{json.dumps(saved, indent=2, ensure_ascii=False)}\n".encode()
        else:
            content = export([result.to_json() | about | {"flags": dict.fromkeys(shown.to_check, ())}], file_format)
    except (ExportError, UnicodeEncodeError) as error:
        raise gr.Error(f"The record cannot be saved: {error}.", print_exception=False) from error
    name = f"{Path(result.source).stem}-record.{file_format}".removeprefix("-")
    return {"name": name, "data": base64.b64encode(content).decode()}
