"""The JavaScript of custom components: one file each, given to Gradio as text."""

import json
from pathlib import Path
from typing import Any


def read_kept(reader: str) -> str:
    """A function for an event's `js`: its last input becomes what that reader of kept.js finds by then."""
    script = read_script("kept")
    return f"(...inputs) => {{\n{script}\nreturn [...inputs.slice(0, -1), {reader}()];\n}}"


def write_kept(writer: str, *values: Any) -> str:
    """A function for an event's `js`: its inputs go to that writer of kept.js, behind these values."""
    arguments = ", ".join(json.dumps(value, ensure_ascii=False) for value in values)
    return f"(...inputs) => {{\n{read_script('kept')}\n{writer}({arguments}, inputs);\n}}"


def keep_partial() -> str:
    """A function for an event's `js` that keeps what is shown of the answer in the open chat."""
    return f"(messages) => {{\n{read_script('kept')}\nkeepPartial(messages);\n}}"


def read_script(name: str) -> str:
    """The script of that name, beside this file."""
    return (Path(__file__).parent / f"{name}.js").read_text(encoding="utf-8")
