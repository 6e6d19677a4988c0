"""ResponseWriter: the items of a response as they grow, and the events that tell of them.

created ─▶ in_progress ─▶ per item: output_item.added ─▶ (content_part.added ─▶ output_text.delta ... done ─▶
content_part.done | the same with reasoning_text | function_call_arguments.delta ... done) ─▶ output_item.done
─▶ completed | incomplete
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from typing import Any

from app.api.errors import ApiError
from app.api.tools.calls import ToolParser

Json = dict[str, Any]
# status, output items, usage -> the response object
Describe = Callable[[str, list[Json], Json | None], Json]
# an item of text -> the type of its part, the prefix of its id, what its events have beside the text
TEXTS: dict[str, tuple[str, str, Json]] = {
    "message": ("output_text", "msg", {"logprobs": []}),
    "reasoning": ("reasoning_text", "rs", {}),
}


class ResponseWriter:
    """Writes one response; `feed` and `finish` return its events, which a reply in one piece does not need."""

    def __init__(self, describe: Describe, reader: ToolParser | None) -> None:
        self.items: list[Json] = []
        self._describe = describe
        self._parser = reader
        self._sequence_number = 0
        self._pieces: list[str] = []  # of the open item
        self._events: list[bytes] = []
        self._is_open = False

    def begin(self) -> bytes:
        """The events before the first token."""
        for kind in ("created", "in_progress"):
            self._tell(f"response.{kind}", response=self._describe("in_progress", [], None))
        return self._take()

    def feed(self, text: str) -> bytes:
        """More text of the model."""
        self._add({"content": text} if self._parser is None else self._parser.feed(text))
        return self._take()

    def finish(self, status: str, usage: Json, extras: Json) -> bytes:
        """The end: every open item is closed; a response without any has an empty message.

        Args:
            extras: fields of ours for the finished response.
        """
        if self._parser is not None:
            self._add(self._parser.close())
        if not self.items:
            self._open_text("message")
        # of the words for the end of a response, items and events know two
        kind = "completed" if status == "completed" else "incomplete"
        self._close(kind)
        self._tell(f"response.{kind}", response=self._describe(status, self.items, usage) | extras)
        return self._take()

    def frame_error(self, error: ApiError) -> bytes:
        """An error as an event; `error` inside is what makes the official client raise it."""
        body = error.body["error"]
        self._tell("error", code=body["code"], message=body["message"], param=body["param"], error=body)
        return self._take()

    def _add(self, delta: Json) -> None:
        for name, kind in (("reasoning", "reasoning"), ("content", "message")):
            if delta.get(name):
                self._add_text(kind, delta[name])
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                self._open_call(part["id"], part["function"]["name"])
            self._add_arguments(part["function"]["arguments"])

    def _add_text(self, kind: str, text: str) -> None:
        if not self._is_open or self.items[-1]["type"] != kind:
            self._open_text(kind)
        self._pieces.append(text)
        part_type, _, more = TEXTS[kind]
        self._tell(f"response.{part_type}.delta", **self._place(), content_index=0, delta=text, **more)

    def _add_arguments(self, text: str) -> None:
        if text:
            self._pieces.append(text)
            self._tell("response.function_call_arguments.delta", **self._place(), delta=text)

    def _open_text(self, kind: str) -> None:
        _, prefix, _ = TEXTS[kind]
        more: Json = {"role": "assistant"} if kind == "message" else {"summary": []}
        self._open({"type": kind, "id": _make_id(prefix), **more, "content": []})
        part = _make_part(kind, "")
        self._tell("response.content_part.added", **self._place(), content_index=0, part=part)

    def _open_call(self, call_id: str, name: str) -> None:
        call = {"type": "function_call", "id": _make_id("fc"), "call_id": call_id, "name": name}
        self._open({**call, "arguments": ""})

    def _open(self, item: Json) -> None:
        self._close("completed")
        item["status"] = "in_progress"
        self.items.append(item)
        self._is_open = True
        self._tell("response.output_item.added", output_index=len(self.items) - 1, item=item)

    def _close(self, status: str) -> None:
        if not self._is_open:
            return
        item, text = self.items[-1], "".join(self._pieces)
        item["status"] = status
        if item["type"] in TEXTS:
            part = _make_part(item["type"], text)
            place = {**self._place(), "content_index": 0}
            part_type, _, more = TEXTS[item["type"]]
            self._tell(f"response.{part_type}.done", **place, text=text, **more)
            self._tell("response.content_part.done", **place, part=part)
            item["content"] = [part]
        else:
            item["arguments"] = text
            kind = "response.function_call_arguments.done"
            self._tell(kind, **self._place(), name=item["name"], arguments=text)
        self._tell("response.output_item.done", output_index=len(self.items) - 1, item=item)
        self._pieces, self._is_open = [], False

    def _place(self) -> Json:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _tell(self, kind: str, **fields: Any) -> None:
        event = {"type": kind, "sequence_number": self._sequence_number, **fields}
        self._sequence_number += 1
        data = json.dumps(event, separators=(",", ":"))
        self._events.append(f"event: {kind}\ndata: {data}\n\n".encode())

    def _take(self) -> bytes:
        events, self._events = self._events, []
        return b"".join(events)


def _make_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def _make_part(kind: str, text: str) -> Json:
    part = {"type": TEXTS[kind][0], "text": text}
    return part | {"annotations": [], "logprobs": []} if kind == "message" else part
