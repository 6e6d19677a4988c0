"""Reads the messages of Ollama's chat as those of chat completions."""

from __future__ import annotations

import json
from typing import Any

from app.api.errors import BadRequest

Json = dict[str, Any]


def read_messages(given: list[Json]) -> list[Json]:
    """Return messages of chat completions: images as parts, calls and their results with ids."""
    result: list[Json] = []
    waiting: list[tuple[str, Any]] = []  # calls without a result: id, name
    for number, message in enumerate(given):
        content = make_content(message.get("content") or "", message.get("images"))
        read: Json = {"role": message.get("role"), "content": content}
        if message.get("thinking"):
            read["reasoning_content"] = message["thinking"]
        if isinstance(calls := message.get("tool_calls"), list):
            read["tool_calls"] = [read_call(call, f"call_{number}_{at}") for at, call in enumerate(calls)]
            waiting += [(call["id"], call["function"].get("name")) for call in read["tool_calls"]]
        elif calls:
            raise BadRequest(f"messages[{number}].tool_calls must be a list", "messages")
        if message.get("role") == "tool":
            name = message.get("tool_name") or message.get("name")
            fitting = [each for each in waiting if each[1] == name] or waiting or [(f"call_{number}", name)]
            read["tool_call_id"] = fitting[0][0]
            waiting = [each for each in waiting if each is not fitting[0]]
        result.append(read)
    return result


def read_call(call: Any, call_id: str) -> Json:
    """Return a call of chat completions, whose arguments are a text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise BadRequest('tool_calls must be {"function": {"name": ..., "arguments": {...}}}', "messages")
    arguments = function.get("arguments") or {}
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": call_id, "type": "function", "function": {"name": function.get("name"), "arguments": text}}


def make_content(text: Any, images: Any) -> Any:
    """Return the content of a message: the text, after its images if there are any."""
    if not images:
        return text
    if not isinstance(images, list) or not all(isinstance(each, str) for each in images):
        raise BadRequest("images must be a list of base64 texts", "images")
    parts = [{"type": "image_url", "image_url": {"url": f"data:;base64,{each}"}} for each in images]
    return [*parts, {"type": "text", "text": text}]
