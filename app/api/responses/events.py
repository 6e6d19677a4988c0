"""The events of items, for a response that grows and for one that is sent again.

output_item.added ─▶ (content_part.added ─▶ output_text.delta ... done ─▶ content_part.done
| the same with reasoning_text | reasoning_summary_part.added ─▶ reasoning_summary_text.delta ... done ─▶ ..._part.done
| function_call_arguments.delta ... done | custom_tool_call_input.delta ... done) ─▶ output_item.done
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from app.api.sse import frame_named

Json = dict[str, Any]
Event = tuple[str, Json]  # its type without "response.", and its fields

# type of a call's item -> its events, the field that grows, the prefix of its id
CALLS = {
    "function_call": ("function_call_arguments", "arguments", "fc"),
    "custom_tool_call": ("custom_tool_call_input", "input", "ctc"),
}
SHELL_CALL = "local_shell_call"  # has no events of its own, as its arguments are not a text


def open_item(index: int, item: Json) -> Iterator[Event]:
    yield "output_item.added", {"output_index": index, "item": item}
    if item["type"] not in (*CALLS, SHELL_CALL):
        yield f"{_name_part(item)}.added", {**_place(index, item), "part": make_part(item, "")}


def grow_item(index: int, item: Json, text: str, **more: Any) -> Event:
    return f"{_name_text(item)}.delta", {**_place(index, item), "delta": text, **more}


def end_item(index: int, item: Json, text: str, **more: Any) -> Iterator[Event]:
    """Yield the events of an item that is complete."""
    place = _place(index, item)
    if item["type"] in CALLS:
        field = CALLS[item["type"]][1]
        yield f"{_name_text(item)}.done", {**place, "name": item["name"], field: text}
    elif item["type"] != SHELL_CALL:
        yield f"{_name_text(item)}.done", {**place, "text": text, **more}
        yield f"{_name_part(item)}.done", {**place, "part": make_part(item, text) | more}
    yield "output_item.done", {"output_index": index, "item": item}


def make_part(item: Json, text: str) -> Json:
    if item["type"] == "message":
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "summary_text" if is_summary(item) else "reasoning_text", "text": text}


def is_summary(item: Json) -> bool:
    """Return whether an item of reasoning has its text as a summary."""
    return item["type"] == "reasoning" and "content" not in item


def list_events(reply: Json) -> Iterator[Event]:
    """Yield the events of a complete response."""
    begun = reply | dict.fromkeys(("completed_at", "incomplete_details", "usage"))
    begun |= {"status": "in_progress", "output": []}
    begun.pop("structured", None)
    for kind in ("created", "in_progress"):
        yield kind, {"response": begun}
    for index, item in enumerate(reply["output"]):
        if item["type"] == SHELL_CALL:
            yield from open_item(index, item | {"action": read_action(""), "status": "in_progress"})
            yield from end_item(index, item, "")
            continue
        field = CALLS[item["type"]][1] if item["type"] in CALLS else "summary" if is_summary(item) else "content"
        more: Json = {}
        if item["type"] in CALLS:
            text = item[field]
        else:
            text = "".join(part["text"] for part in item[field])
            more = {"logprobs": item[field][0]["logprobs"]} if item["type"] == "message" else {}
        yield from open_item(index, item | {field: type(item[field])(), "status": "in_progress"})
        if text:
            yield grow_item(index, item, text, **more)
        yield from end_item(index, item, text, **more)
    yield "completed" if reply["status"] == "completed" else "incomplete", {"response": reply}


def read_action(text: str) -> Json:
    """Return the action of a call of the local shell from its arguments; a text that was cut has no command."""
    try:
        return {"type": "exec", "command": [], "env": {}} | json.loads(text)
    except ValueError:
        return {"type": "exec", "command": [], "env": {}}


def frame_event(kind: str, fields: Json, number: int) -> bytes:
    """Return an event as a client gets it."""
    return frame_named(f"response.{kind}", {"sequence_number": number, **fields})


def _name_text(item: Json) -> str:
    if item["type"] in CALLS:
        return CALLS[item["type"]][0]
    return "output_text" if item["type"] == "message" else f"reasoning_{'summary_' * is_summary(item)}text"


def _name_part(item: Json) -> str:
    return "reasoning_summary_part" if is_summary(item) else "content_part"


def _place(index: int, item: Json) -> Json:
    place: Json = {"item_id": item["id"], "output_index": index}
    if item["type"] in CALLS:
        return place
    return place | {"summary_index" if is_summary(item) else "content_index": 0}
