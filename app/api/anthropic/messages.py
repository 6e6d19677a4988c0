"""The messages of POST /v1/messages as chat messages. What is wrong is named as it came, not as it would be there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from app.api.errors import BadRequest
from app.api.fields import check_choice, field_of, read_text
from app.api.messages import MAX_TOOL_CALLS
from engine import join_parts

Json = dict[str, Any]

ROLES = ("user", "assistant", "system")
IMAGE_TYPES = ("image/png", "image/jpeg", "image/webp")
THOUGHTS = ("thinking", "redacted_thinking")


def read_messages(system: str | list[Json] | None, messages: Sequence[Json]) -> list[Json]:
    """The conversation, with the system's field in front.

    Raises:
        ApiError: 400 for what is not supported.
    """
    read: list[Json] = []
    if system:
        read.append({"role": "system", "content": _join("system", system)})
    for i, message in enumerate(messages):
        role, where = message.get("role"), f"messages[{i}]"
        check_choice(f"{where}.role", role, ROLES)
        read += _read_message(f"{where}.content", str(role), message.get("content"))
    return read


def is_prefill(messages: Sequence[Json]) -> bool:
    """Return whether the model is to go on with the last message; one that calls tools is complete."""
    last = messages[-1]
    return last["role"] == "assistant" and "tool_calls" not in last


def _read_message(where: str, role: str, content: object) -> list[Json]:
    if role == "user" and isinstance(content, list):
        return _read_user(where, content)
    if role == "assistant" and isinstance(content, list):
        return [_read_assistant(where, content)]
    return [{"role": role, "content": _join(where, content)}]


def _read_user(where: str, blocks: list[Any]) -> list[Json]:
    """Results of tools are messages of their own for a chat template, before what else the user says."""
    results: list[Json] = []
    parts: list[str | Json] = []
    for i, block in enumerate(blocks):
        if _kind_of(block) == "tool_result":
            identity = read_text(f"{where}[{i}].tool_use_id", block.get("tool_use_id"))
            content = block.get("content")
            text = "" if content is None else _join(f"{where}[{i}].content", content)
            if _is_error(f"{where}[{i}].is_error", block.get("is_error")):
                # chat templates have no other place for it
                text = f"Error: {text}"
            results.append({"role": "tool", "tool_call_id": identity, "content": text})
        elif _kind_of(block) == "image":
            parts.append(_read_image(f"{where}[{i}].source", block.get("source")))
        else:
            parts.append(_text_of(f"{where}[{i}]", block))
    return [*results, {"role": "user", "content": join_parts(parts)}] if parts or not results else results


def _read_image(where: str, source: object) -> Json:
    """Return an image as chat completions have it."""
    found = source if isinstance(source, dict) else {}
    kind, media_type = found.get("type"), found.get("media_type")
    if kind == "base64" and media_type in IMAGE_TYPES:
        url = f"data:{media_type};base64,{read_text(f'{where}.data', found.get('data'))}"
    elif kind == "url":
        url = read_text(f"{where}.url", found.get("url"))
    else:
        message = f"{where} must be base64 with a media_type of {', '.join(IMAGE_TYPES)}, or a url"
        raise BadRequest(message, field_of(where), "unsupported_content")
    return {"type": "image_url", "image_url": {"url": url}}


def _read_assistant(where: str, blocks: list[Any]) -> Json:
    words: list[str] = []
    calls: list[Json] = []
    for i, block in enumerate(blocks):
        if _kind_of(block) == "tool_use":
            calls.append(_read_call(f"{where}[{i}]", block))
        elif _kind_of(block) not in THOUGHTS:
            words.append(_text_of(f"{where}[{i}]", block))
    if len(calls) > MAX_TOOL_CALLS:
        text = f"{where} has {len(calls)} tool_use blocks; at most {MAX_TOOL_CALLS} are allowed"
        raise BadRequest(text, "messages")
    message: Json = {"role": "assistant", "content": join_parts(words)}
    return message | {"tool_calls": calls} if calls else message


def _read_call(where: str, block: Json) -> Json:
    arguments = block.get("input", {})
    if not isinstance(arguments, dict):
        raise BadRequest(f"{where}.input must be an object", "messages")
    function = {
        "name": read_text(f"{where}.name", block.get("name")),
        "arguments": json.dumps(arguments, ensure_ascii=False),
    }
    return {"id": read_text(f"{where}.id", block.get("id")), "type": "function", "function": function}


def _join(where: str, content: object) -> str:
    """The text of what is a text or blocks of it."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{where} must be a text or a list of blocks", field_of(where))
    return "\n".join(_text_of(f"{where}[{i}]", block) for i, block in enumerate(content))


def _text_of(where: str, block: Any) -> str:
    if _kind_of(block) != "text":
        message = f"{where}: only text is supported here, not {(_kind_of(block) or 'this')[:40]!r}"
        raise BadRequest(message, field_of(where), "unsupported_content")
    return read_text(f"{where}.text", block.get("text"))


def _is_error(where: str, value: object) -> bool:
    if value is not None and not isinstance(value, bool):
        raise BadRequest(f"{where}={str(value)[:40]!r} must be true or false", field_of(where))
    return value is True


def _kind_of(block: object) -> str:
    return str(block.get("type", "")) if isinstance(block, dict) else ""
