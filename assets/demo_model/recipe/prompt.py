"""The one prompt format: ChatML, a system line, the schema and the document; the app builds the same."""

import json
from collections.abc import Sequence
from typing import Any

SYSTEM_PROMPT = "You extract structured data. Answer with one JSON object that matches the schema."
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Message = dict[str, str]


def minify(schema: dict[str, Any]) -> str:
    return json.dumps(schema, ensure_ascii=False, separators=(",", ":"))


def extraction_prompt(schema: dict[str, Any], document: str) -> str:
    """The user message of an extraction."""
    return f"Schema:\n{minify(schema)}\n\nDocument:\n{document}"


def extraction_messages(schema: dict[str, Any], document: str) -> list[Message]:
    """The messages to send for one document; the answer is the record in `json.dumps` default spacing."""
    return [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": extraction_prompt(schema, document)},
    ]


def list_fields(schema: dict[str, Any]) -> str:
    """A schema as a plain list of fields, for prompts without JSON Schema."""
    return "\n".join(f"- {name}: {_describe(field)}" for name, field in schema["properties"].items())


def _describe(field: dict[str, Any]) -> str:
    kind = _type_text(field)
    return f"{kind} ({field['description']})" if "description" in field else kind


def _type_text(field: dict[str, Any]) -> str:
    if "enum" in field:
        return " | ".join(field["enum"])
    if "anyOf" in field:
        return " or ".join(_type_text(option) for option in field["anyOf"])
    kind = field.get("type", "string")
    if isinstance(kind, list):
        return " or ".join(kind)
    if kind == "array":
        return f"list of {_type_text(field['items'])}"
    if kind == "object":
        return "object with " + ", ".join(field["properties"])
    return "date" if field.get("format") == "date" else str(kind)


def render_chat(messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
    """Return the prompt that the chat template renders."""
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    return text + ("<|im_start|>assistant\n" if add_generation_prompt else "")
