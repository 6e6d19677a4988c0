"""The messages that ask a model for one record: the form that the demo model is trained on."""

from __future__ import annotations

import json
from typing import Any

Schema = dict[str, Any]

SYSTEM_PROMPT = "You extract structured data. Answer with one JSON object that matches the schema."

# Bookkeeping of the schema file; it tells a model nothing about the record.
FILE_KEYWORDS = ("$schema", "$id", "$comment")


def make_messages(schema: Schema, text: str) -> list[dict[str, str]]:
    """The chat messages for one document."""
    shown = {keyword: value for keyword, value in schema.items() if keyword not in FILE_KEYWORDS}
    minified = json.dumps(shown, ensure_ascii=False, separators=(",", ":"))
    return [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": f"Schema:\n{minified}\n\nDocument:\n{text}"},
    ]


def make_plain_prompt(messages: list[dict[str, str]]) -> str:
    """The same request as one text, for models without a chat template."""
    return "\n\n".join(message["content"] for message in messages) + "\n\nJSON:\n"
