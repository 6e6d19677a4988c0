"""The messages that ask a model for one record: the form that the demo model is trained on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Schema = dict[str, Any]

SYSTEM_PROMPT = "You extract structured data. Answer with one JSON object that matches the schema."

# Keywords that identify the schema file; they say nothing about the record.
FILE_KEYWORDS = ("$schema", "$id", "$comment", "x-checks")


@dataclass(frozen=True, slots=True)
class Example:
    """A text with its right record, shown to the model before the text that is read."""

    text: str
    record: Any


def make_messages(
    schema: Schema, text: str, instructions: str = "", examples: Sequence[Example] = (),
    images: Sequence[bytes | str] = (),
) -> list[dict[str, Any]]:
    """The chat messages for one document: instructions follow the system prompt, examples are turns of their own.

    Args:
        images: pages of the document, as files or URLs; they precede its text.
    """
    shown = {keyword: value for keyword, value in schema.items() if keyword not in FILE_KEYWORDS}
    minified = json.dumps(shown, ensure_ascii=False, separators=(",", ":"))
    system = "\n\n".join(filter(None, (SYSTEM_PROMPT, instructions.strip())))
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}]
    for example in examples:
        messages += [
            {"role": "user", "content": f"Schema:\n{minified}\n\nDocument:\n{example.text}"},
            {"role": "assistant", "content": json.dumps(example.record, ensure_ascii=False)},
        ]
    asked: Any = f"Schema:\n{minified}\n\nDocument:\n"
    if images:
        shown_images = [{"type": "image", "image": image} for image in images]
        asked = [{"type": "text", "text": asked}, *shown_images, {"type": "text", "text": text}]
    else:
        asked += text
    return [*messages, {"role": "user", "content": asked}]


def make_plain_prompt(messages: list[dict[str, Any]]) -> str:
    """The same request as one text, for models without a chat template."""
    return "\n\n".join(message["content"] for message in messages) + "\n\nJSON:\n"


def parse_examples(text: str) -> tuple[Example, ...]:
    """Read examples from JSON lines {"text": ..., "record": ...}."""
    return tuple(Example(given["text"], given["record"]) for _, given in read_labelled(text, "Line"))


def read_labelled(text: str, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place and the object of each JSON line that is not blank; it has a `text` and a `record`.

    Args:
        name: how the number of a line is introduced.

    Raises ValueError: a line is no such object.
    """
    # Not splitlines, which also ends a line at characters that JSON leaves as they are.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                given = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{name} {number} is not JSON: {error}") from error
            if not isinstance(given, dict) or not isinstance(given.get("text"), str) or "record" not in given:
                raise ValueError(f"{name} {number} needs `text`, a string, and `record`")
            yield f"{name} {number}", given
