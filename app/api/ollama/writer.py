"""Writes the answers of Ollama's chat and generate, whole or as lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

from app.api import replies
from app.api.call import Call
from app.api.messages import read_arguments
from app.api.sse import Emit
from app.api.tools.calls import make_message
from engine import CompletionOutput, RequestOutput

Json = dict[str, Any]


class AnswerWriter:
    """Writes the answer of /api/chat, or of /api/generate."""

    def __init__(self, call: Call, is_chat: bool) -> None:
        self.call = call
        self._is_chat = is_chat
        self._num_tokens = 0
        self._calls: list[Json] = []

    def whole(self, output: RequestOutput) -> Json:
        """Return the answer of a finished request."""
        choice, reader = output.outputs[0], self.call.make_reader()
        self._num_tokens = len(choice.token_ids)
        message: Json = {"content": choice.text}
        if reader is not None:
            message = make_message(reader, choice.text, not replies.is_own_end(choice))
        return self.piece(message, choice) | self._end(output, choice)

    async def stream(self, emit: Emit) -> None:
        """Emit a piece for each output, the calls when they are whole, and the figures."""
        reader = self.call.make_reader()
        async with aclosing(self.call.generate()) as outputs:
            async for output in outputs:
                choice = output.outputs[0]
                self._num_tokens += len(choice.token_ids)
                deltas = [{"content": choice.text}] if reader is None else [reader.feed(choice.text)]
                if reader is not None and choice.is_finished:
                    deltas.append(reader.close(not replies.is_own_end(choice)))
                for delta in deltas:
                    self._take_calls(delta)
                    if delta.get("content") or delta.get("reasoning"):
                        await emit(make_line(self.piece(delta, choice)))
                if choice.is_finished:
                    if self._calls:
                        await emit(make_line(self.piece({"content": "", "tool_calls": self._calls})))
                    await emit(make_line(self.piece({"content": ""}) | self._end(output, choice)))

    def _take_calls(self, delta: Json) -> None:
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                self._calls.append({"id": part["id"], "function": dict(part["function"])})
            else:
                self._calls[-1]["function"]["arguments"] += part["function"]["arguments"]

    def piece(self, message: Mapping[str, Any], choice: CompletionOutput | None = None) -> Json:
        """Return a part of the answer, with the log probabilities of its tokens if they are wanted."""
        content, thought = message.get("content") or "", message.get("reasoning")
        answer: Json = {"role": "assistant", "content": content} if self._is_chat else {"response": content}
        if thought:
            answer["thinking"] = thought
        if calls := message.get("tool_calls"):
            answer["tool_calls"] = [
                {"id": call["id"], "function": {
                    "index": index, "name": call["function"]["name"],
                    "arguments": read_arguments(call["function"]["arguments"] or "{}") or {},
                }}
                for index, call in enumerate(calls)
            ]  # fmt: skip
        found = None if choice is None else replies.chat_logprobs(self.call, choice)
        created = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        head = {"model": self.call.model, "created_at": created}
        body = {"message": answer} if self._is_chat else answer
        return head | body | ({} if found is None else {"logprobs": found["content"]}) | {"done": False}

    def _end(self, output: RequestOutput, choice: CompletionOutput) -> Json:
        """Return the fields of the last part; durations in nanoseconds."""
        times = output.metrics
        first_s, last_s = (
            times.arrival_time if each is None else each for each in (times.first_token_time, times.last_token_time)
        )
        return {
            "done": True,
            "done_reason": choice.finish_reason,
            "total_duration": to_ns(last_s - times.arrival_time),
            "load_duration": 0,
            "prompt_eval_count": len(output.prompt_token_ids),
            "prompt_eval_duration": to_ns(first_s - times.arrival_time),
            "eval_count": self._num_tokens,
            "eval_duration": to_ns(last_s - first_s),
        }


def show_time(seconds: float) -> str:
    """Return a time as RFC 3339."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def to_ns(seconds: float) -> int:
    return round(seconds * 1e9)


def make_line(value: Json) -> bytes:
    """Return one line of a stream."""
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"
