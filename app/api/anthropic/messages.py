"""Reads the messages of POST /v1/messages. Errors name the field and the block as the request has them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from app.api.errors import refuse
from app.api.messages import MAX_TOOL_CALLS, make_call
from app.api.parts import make_text, read_part, read_parts
from app.api.protocol import check_choice, read_text
from app.api.wording import Path, say_value

Json = dict[str, Any]

ROLES = ("user", "assistant", "system")
# Claude Code's first system block changes with every request, which would end the cached prefix there.
BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")


def read_messages(system: str | list[Json] | None, messages: Sequence[Json]) -> list[Json]:
    """Return the conversation as chat messages, with the system's field in front.

    Raises ApiError: 400 for what is not supported.
    """
    read: list[Json] = []
    if parts := _read_system(system or []):
        read.append({"role": "system", "content": parts})
    for i, message in enumerate(messages):
        role, where = message.get("role"), ("messages", i)
        check_choice((*where, "role"), role, ROLES)
        content, place = message.get("content"), (*where, "content")
        if role == "user" and isinstance(content, list):
            read += _read_user(place, content)
        elif role == "assistant" and isinstance(content, list):
            read.append(_read_assistant(place, content))
        else:
            read.append({"role": role, "content": read_parts(place, content)})
    return read


def _read_system(system: str | list[Json]) -> list[Json]:
    parts = read_parts(("system",), system)
    if parts and parts[0]["type"] == "text":
        parts[:1] = [make_text(rest)] if (rest := BILLING.sub("", parts[0]["text"])) else []
    return parts


def is_prefill(messages: Sequence[Json]) -> bool:
    """Return whether the model is to go on with the last message; one that calls tools is complete."""
    last = messages[-1]
    return last["role"] == "assistant" and "tool_calls" not in last


def _read_user(where: Path, blocks: list[Any]) -> list[Json]:
    """Return the results of tools, which are messages of their own for a chat template, then the other blocks."""
    results: list[Json] = []
    parts: list[Json] = []
    for i, block in enumerate(blocks):
        place = (*where, i)
        if _kind_of(block) != "tool_result":
            parts += read_part(place, block)
            continue
        identity = read_text((*place, "tool_use_id"), block.get("tool_use_id"))
        content = block.get("content")
        found = [] if content is None else read_parts((*place, "content"), content, is_history=True)
        if _is_error((*place, "is_error"), block.get("is_error")):
            # chat templates have no other place for it
            is_text = bool(found) and found[0]["type"] == "text"
            found[:is_text] = [make_text("Error: " + (found[0]["text"] if is_text else ""))]
        results.append({"role": "tool", "tool_call_id": identity, "content": found})
    return [*results, {"role": "user", "content": parts}] if parts or not results else results


def _read_assistant(where: Path, blocks: list[Any]) -> Json:
    parts: list[Json] = []
    calls: list[Json] = []
    reasoning: list[str] = []
    for i, block in enumerate(blocks):
        match _kind_of(block):
            case "tool_use":
                calls.append(_read_call((*where, i), block))
            case "thinking":
                reasoning.append(read_text((*where, i, "thinking"), block.get("thinking")))
            case "redacted_thinking":
                pass  # only Anthropic's own models can read it
            case _:
                parts += read_part((*where, i), block, is_history=True)
    if len(calls) > MAX_TOOL_CALLS:
        raise refuse(where, f" has {len(calls)} tool_use blocks; at most {MAX_TOOL_CALLS} are allowed")
    message: Json = {"role": "assistant", "content": parts}
    if reasoning:
        message["reasoning_content"] = "\n\n".join(reasoning)
    return message | {"tool_calls": calls} if calls else message


def _read_call(where: Path, block: Json) -> Json:
    arguments = block.get("input", {})
    if not isinstance(arguments, dict):
        raise refuse((*where, "input"), " must be an object")
    name = read_text((*where, "name"), block.get("name"))
    return make_call(read_text((*where, "id"), block.get("id")), name, arguments)


def _is_error(where: Path, value: object) -> bool:
    if value is not None and not isinstance(value, bool):
        raise refuse(where, f"={say_value(value)} must be true or false")
    return value is True


def _kind_of(block: object) -> str:
    return str(block.get("type", "")) if isinstance(block, dict) else ""
