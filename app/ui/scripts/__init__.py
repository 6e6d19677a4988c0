"""The JavaScript of custom components: one file each, passed to Gradio as text."""

import json
from functools import cache
from pathlib import Path
from typing import Any


def read_kept(*readers: str) -> str:
    """Return an event's `js` function whose last inputs are replaced by the results of these readers of kept.js."""
    calls = ", ".join(f"{reader}()" for reader in readers)
    script = read_script("kept")
    return f"(...inputs) => {{\n{script}\nreturn [...inputs.slice(0, -{len(readers)}), {calls}];\n}}"


def write_kept(writer: str, *values: Any) -> str:
    """Return an event's `js` function that passes these values and the inputs to that writer of kept.js."""
    arguments = ", ".join(json.dumps(value, ensure_ascii=False) for value in values)
    return f"(...inputs) => {{\n{read_script('kept')}\n{writer}({arguments}, inputs);\n}}"


def keep_touched(defaults: list[Any]) -> str:
    """Return an event's `js` function that drops the updates of values which are no longer the defaults."""
    return (
        f"({{ updates }}, ...values) => {{\nconst defaults = {json.dumps(defaults, ensure_ascii=False)};\n"
        "const isSame = (at) => JSON.stringify(values[at]) === JSON.stringify(defaults[at]);\n"
        "return (updates || []).map((update, at) => isSame(at) ? update : undefined);\n}"
    )


@cache
def read_script(name: str) -> str:
    """Return a script without its comments and indentation, because every first visit loads it."""
    lines = map(str.strip, (Path(__file__).parent / f"{name}.js").read_text(encoding="utf-8").splitlines())
    return "\n".join(line for line in lines if not line.startswith("//"))
