"""Reads the messages of Ollama's chat."""

from __future__ import annotations

from typing import Any

from app.api.errors import refuse
from app.api.messages import MAX_TOOL_CALLS, make_call, parse_arguments, read_message
from app.api.protocol import read_text
from app.api.wording import Path
from app.json_text import ValueCounter

Json = dict[str, Any]


def read_messages(given: list[Json]) -> list[Json]:
    """Return chat messages as `read_message` does: images as parts, calls and their results with ids."""
    counter = ValueCounter()
    result: list[Json] = []
    waiting: list[tuple[str, Any]] = []  # calls without a result: id, name
    for number, message in enumerate(given):
        where = ("messages", number)
        content = make_content(message.get("content") or "", message.get("images"))
        plain: Json = {"role": message.get("role"), "content": content}
        if message.get("thinking"):
            plain["reasoning_content"] = message["thinking"]
        if message.get("role") == "tool":
            name = message.get("tool_name") or message.get("name")
            fitting = [each for each in waiting if each[1] == name] or waiting or [(f"call_{number}", name)]
            plain["tool_call_id"] = fitting[0][0]
            waiting = [each for each in waiting if each is not fitting[0]]
        read = read_message(where, plain, counter)
        if calls := message.get("tool_calls"):
            place = (*where, "tool_calls")
            if not isinstance(calls, list) or len(calls) > MAX_TOOL_CALLS:
                raise refuse(place, f" must be a list of at most {MAX_TOOL_CALLS}")
            read["tool_calls"] = [
                read_call((*place, at), call, f"call_{number}_{at}", counter) for at, call in enumerate(calls)
            ]
            waiting += [(call["id"], call["function"]["name"]) for call in read["tool_calls"]]
        result.append(read)
    return result


def read_call(where: Path, call: Any, call_id: str, counter: ValueCounter) -> Json:
    """Return a call, whose arguments are an object or its text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise refuse(where, ' must be {"function": {"name": ..., "arguments": {...}}}')
    arguments = function.get("arguments") or {}
    if not isinstance(arguments, dict):
        arguments = parse_arguments((*where, "function", "arguments"), arguments, counter)
    return make_call(call_id, read_text((*where, "function", "name"), function.get("name")), arguments)


def make_content(text: Any, images: Any) -> Any:
    """Return the content of a message: the text, after its images if there are any."""
    if not images:
        return text
    if not isinstance(images, list) or not all(isinstance(each, str) for each in images):
        raise refuse(("images",), " must be a list of base64 texts")
    parts = [{"type": "image_url", "image_url": {"url": f"data:;base64,{each}"}} for each in images]
    return [*parts, {"type": "text", "text": text}]
