"""The JavaScript of custom components: one file each, given to Gradio as text."""

from pathlib import Path


def read_script(name: str) -> str:
    """The script of that name, beside this file."""
    return (Path(__file__).parent / f"{name}.js").read_text(encoding="utf-8")
