"""Validates chat messages and joins the content parts of each, as chat templates expect one string."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.errors import InvalidRequest

# type of a content part -> the key of its text
TEXT_KEYS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def read_messages(messages: object) -> list[dict[str, Any]]:
    """Copy a conversation with each content joined into one string; other keys are kept.

    Content may be missing in an assistant message with tool calls.

    Raises:
        InvalidRequest: the error names the message and the problem.
    """
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        kind = type(messages).__name__
        raise InvalidRequest(
            f"messages must be a list of {{'role': ..., 'content': ...}}, not {kind}", "messages"
        )
    return [_read_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _read_message(where: str, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _refuse(f"{where} must be a mapping with role and content, not {type(message).__name__}")
    if not isinstance(message.get("role"), str):
        raise _refuse(f"{where}.role must be a string, not {type(message.get('role')).__name__}")
    content = message.get("content")
    if content is None and message["role"] == "assistant" and message.get("tool_calls"):
        content = ""
    return {**message, "content": _join(f"{where}.content", content)}


def _join(where: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        raise _refuse(f"{where} is missing: it must be a string or a list of text parts")
    if isinstance(content, bytes) or not isinstance(content, Sequence):
        raise _refuse(f"{where} must be a string or a list of text parts, not {type(content).__name__}")
    return "".join(_read_part(f"{where}[{i}]", part) for i, part in enumerate(content))


def _read_part(where: str, part: object) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if not isinstance(part, Mapping) or not isinstance(kind, str) or kind not in TEXT_KEYS:
        raise _refuse(f"{where}: only text parts are supported, not {str(kind)[:40]!r}")
    text = part.get(TEXT_KEYS[kind])
    if not isinstance(text, str):
        raise _refuse(f"{where}.{TEXT_KEYS[kind]} must be a string, not {type(text).__name__}")
    return text


def _refuse(message: str) -> InvalidRequest:
    return InvalidRequest(message, "messages")
