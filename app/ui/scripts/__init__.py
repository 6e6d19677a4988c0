"""The JavaScript of custom components: one file each, given to Gradio as text."""

from pathlib import Path


def read_kept(reader: str) -> str:
    """A function for an event's `js`: its last input becomes what that reader of kept.js finds by then."""
    script = read_script("kept")
    return f"(...inputs) => {{\n{script}\nreturn [...inputs.slice(0, -1), {reader}()];\n}}"


def read_script(name: str) -> str:
    """The script of that name, beside this file."""
    return (Path(__file__).parent / f"{name}.js").read_text(encoding="utf-8")
