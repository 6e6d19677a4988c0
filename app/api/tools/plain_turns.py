"""Calls and their results as plain text, for a chat template that knows neither."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Json = dict[str, Any]


def tell_plainly(messages: Sequence[Mapping[str, Any]]) -> list[Json]:
    """The conversation with calls as JSON in the assistant's words, and their results as the user's.

    Results that follow each other, and what the user says to them, are one message: many templates want turns.

    Args:
        messages: as `read_messages` returns them.
    """
    told: list[Json] = []
    names: dict[str, str] = {}  # of the functions, by the id of their call
    was_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        plain = _tell_result(message, names) if is_result else _tell_calls(message)
        if told and was_result and plain["role"] == "user":
            told[-1]["content"] += "\n" + plain["content"]
        else:
            told.append(plain)
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}
        was_result = told[-1]["role"] == "user" and (is_result or was_result)
    return told


def _tell_calls(message: Mapping[str, Any]) -> Json:
    """A message whose calls are lines of its content, each as a forced call is written."""
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ())]
    lines = [message["content"]] if message["content"] or not calls else []
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return kept | {"content": "\n".join((*lines, *calls))}


def _tell_result(message: Mapping[str, Any], names: Mapping[str, str]) -> Json:
    name = message.get("name") or names.get(message["tool_call_id"])
    start = f"Result of {name}" if name else "Result"
    return {"role": "user", "content": f"{start}: {message['content']}"}
