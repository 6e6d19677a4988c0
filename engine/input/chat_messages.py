"""Validates chat messages and joins the content parts of each into one string; images become slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.errors import InvalidRequest
from engine.input.images.source import Source, is_image, read_source

# type of a content part -> the key of its text
TEXT_KEYS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
# Stands for an image in the messages that a chat template gets.
IMAGE_SLOT = {"type": "image"}


def read_messages(messages: object) -> tuple[list[dict[str, Any]], list[Source]]:
    """Copy a conversation with each content joined into one string; other keys are kept.

    Content may be missing in an assistant message with tool calls. Content with images stays a list of parts, with a
    slot for each image.

    Returns the conversation, and the images of its users in order.

    Raises:
        InvalidRequest: the error names the message and the problem.
    """
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        kind = type(messages).__name__
        raise _refuse(f"messages must be a list of {{'role': ..., 'content': ...}}, not {kind}")
    sources: list[Source] = []
    return [_read_message(f"messages[{i}]", message, sources) for i, message in enumerate(messages)], sources


def _read_message(where: str, message: object, sources: list[Source]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _refuse(f"{where} must be a mapping with role and content, not {type(message).__name__}")
    if not isinstance(message.get("role"), str):
        raise _refuse(f"{where}.role must be a string, not {type(message.get('role')).__name__}")
    content = message.get("content")
    if content is None and message["role"] == "assistant" and message.get("tool_calls"):
        content = ""
    images = sources if message["role"] == "user" else None
    return {**message, "content": _join(f"{where}.content", content, images)}


def _join(where: str, content: object, sources: list[Source] | None) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    if content is None:
        raise _refuse(f"{where} is missing: it must be a string or a list of text parts")
    if isinstance(content, bytes) or not isinstance(content, Sequence):
        raise _refuse(f"{where} must be a string or a list of text parts, not {type(content).__name__}")
    texts: list[str] = []
    parts: list[dict[str, str]] = []
    for i, part in enumerate(content):
        if part != IMAGE_SLOT and (sources is None or not is_image(part)):
            texts.append(_read_part(f"{where}[{i}]", part))
            parts.append({"type": "text", "text": texts[-1]})
            continue
        if part != IMAGE_SLOT and sources is not None:
            sources.append(read_source(f"{where}[{i}]", part))
        parts.append(IMAGE_SLOT)
    return "".join(texts) if len(texts) == len(parts) else parts


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
