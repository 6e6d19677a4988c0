"""MessageWriter: the content blocks of a message as they grow, and the events that tell of them.

message_start ─▶ per block: content_block_start ─▶ content_block_delta ... ─▶ content_block_stop
              ─▶ message_delta (why it stopped, usage) ─▶ message_stop
"""

from __future__ import annotations

import json
from typing import Any

from app.api.errors import ApiError
from app.api.json_body import check_values
from app.api.tools.calls import ToolParser

Json = dict[str, Any]


class MessageWriter:
    """Writes one message; its methods return the events, which a reply in one piece does not need."""

    def __init__(self, reader: ToolParser | None) -> None:
        self.blocks: list[Json] = []
        self._parser = reader
        self._pieces: list[str] = []  # of the open block
        self._events: list[bytes] = []
        self._is_open = False

    @property
    def has_calls(self) -> bool:
        return any(block["type"] == "tool_use" for block in self.blocks)

    def begin(self, message: Json) -> bytes:
        """The event before the first token."""
        self._tell("message_start", message=message)
        return self._take()

    def feed(self, text: str) -> bytes:
        """More text of the model."""
        self._add({"content": text} if self._parser is None else self._parser.feed(text))
        return self._take()

    def close(self) -> bytes:
        """The end of the text: every open block is closed."""
        if self._parser is not None:
            self._add(self._parser.close())
        self._close_block()
        return self._take()

    def end(self, delta: Json, usage: Json, extras: Json) -> bytes:
        """The last events.

        Args:
            extras: fields of ours, beside the protocol's.
        """
        self._tell("message_delta", delta=delta, usage=usage, **extras)
        self._tell("message_stop")
        return self._take()

    def _add(self, delta: Json) -> None:
        if thought := delta.get("reasoning"):
            if not self._is_open or self.blocks[-1]["type"] != "thinking":
                # the protocol requires a signature; this server does not check it
                self._open_block({"type": "thinking", "thinking": "", "signature": ""})
            self._grow("thinking_delta", "thinking", thought)
        if words := delta.get("content"):
            if not self._is_open or self.blocks[-1]["type"] != "text":
                self._open_block({"type": "text", "text": ""})
            self._grow("text_delta", "text", words)
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                call = {"type": "tool_use", "id": part["id"], "name": part["function"]["name"], "input": {}}
                self._open_block(call)
            if arguments := part["function"]["arguments"]:
                self._grow("input_json_delta", "partial_json", arguments)

    def _grow(self, kind: str, name: str, text: str) -> None:
        self._pieces.append(text)
        self._tell("content_block_delta", index=len(self.blocks) - 1, delta={"type": kind, name: text})

    def _open_block(self, block: Json) -> None:
        self._close_block()
        self.blocks.append(block)
        self._is_open = True
        self._tell("content_block_start", index=len(self.blocks) - 1, content_block=block)

    def _close_block(self) -> None:
        if not self._is_open:
            return
        block, text = self.blocks[-1], "".join(self._pieces)
        if block["type"] in ("text", "thinking"):
            block[block["type"]] = text
        else:
            block["input"] = _read_input(text)
        self._tell("content_block_stop", index=len(self.blocks) - 1)
        self._pieces, self._is_open = [], False

    def _tell(self, kind: str, **fields: Any) -> None:
        self._events.append(frame({"type": kind, **fields}))

    def _take(self) -> bytes:
        events, self._events = self._events, []
        return b"".join(events)


def frame(event: Json) -> bytes:
    """One event, named after its type."""
    data = json.dumps(event, separators=(",", ":"))
    return f"event: {event['type']}\ndata: {data}\n\n".encode()


def frame_error(error: ApiError) -> bytes:
    """An error after the first event."""
    return frame(error.anthropic_body)


def _read_input(text: str) -> Json:
    """The arguments of a call; one that was cut off by the token limit has none.

    Raises:
        ApiError: 500 for what the model has written to its end, and no JSON can hold.
    """
    try:
        arguments = json.loads(text or "{}")
        check_values(arguments)
    except json.JSONDecodeError:
        return {}
    except (ValueError, RecursionError):
        message = (
            "the model called a tool with arguments that no JSON can hold: "
            "a number too large, half of a surrogate pair, or too many levels"
        )
        raise ApiError(500, message, code="generation_failed") from None
    return arguments if isinstance(arguments, dict) else {}
