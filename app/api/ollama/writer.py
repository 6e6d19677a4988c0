"""Writes the answers of Ollama's chat and generate, whole or as lines of JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

from app.api.call import Call, Choice
from app.api.messages import read_arguments
from app.api.sse import Emit
from app.api.tools.styled_calls import Piece
from engine import TokenLogprobs

Json = dict[str, Any]


class AnswerWriter:
    """Writes the answer of /api/chat, or of /api/generate."""

    def __init__(self, call: Call, is_chat: bool) -> None:
        self.call = call
        self._is_chat = is_chat

    async def finish(self) -> Json:
        """Run the request to its end and return the answer."""
        (choice,) = await self.call.finish()
        piece = self.piece(choice.read("content"), choice.read("reasoning"), choice.logprobs, choice.calls)
        return piece | self._end(choice)

    async def stream(self, emit: Emit) -> None:
        """Emit a piece for each output, the calls when they are whole, and the figures."""
        async with aclosing(self.call.stream()) as steps:
            async for ((choice, pieces, gained),) in steps:
                content, reasoning = (
                    "".join(piece.text for piece in pieces if piece.kind == kind) for kind in ("content", "reasoning")
                )
                if content or reasoning:
                    await emit(make_line(self.piece(content, reasoning, gained.logprobs)))
                if gained.is_finished:
                    if calls := choice.calls:
                        await emit(make_line(self.piece("", calls=calls)))
                    await emit(make_line(self.piece("") | self._end(choice)))

    def piece(
        self, content: str, reasoning: str = "", logprobs: list[TokenLogprobs] | None = None,
        calls: Sequence[Piece] = (),
    ) -> Json:
        """Return a part of the answer, with the log probabilities of its tokens if they are wanted."""
        answer: Json = {"role": "assistant", "content": content} if self._is_chat else {"response": content}
        if reasoning:
            answer["thinking"] = reasoning
        if calls:
            answer["tool_calls"] = [
                {"id": call.call_id, "function": {
                    "index": index, "name": call.name, "arguments": read_arguments(call.text or "{}") or {},
                }}
                for index, call in enumerate(calls)
            ]
        found = self.call.describe_logprobs(logprobs)
        head = {"model": self.call.model, "created_at": show_time(time.time())}
        body = {"message": answer} if self._is_chat else answer
        return head | body | ({} if found is None else {"logprobs": found["content"]}) | {"done": False}

    def _end(self, choice: Choice) -> Json:
        """Return the fields of the last part; durations in nanoseconds."""
        output, times = choice.output, choice.output.metrics
        first_s, last_s = (
            times.arrival_time if each is None else each for each in (times.first_token_time, times.last_token_time)
        )
        return {
            "done": True, "done_reason": choice.finish_reason,
            "total_duration": to_ns(last_s - times.arrival_time), "load_duration": 0,
            "prompt_eval_count": len(output.prompt_token_ids),
            "prompt_eval_duration": to_ns(first_s - times.arrival_time), "eval_count": len(choice.token_ids),
            "eval_duration": to_ns(last_s - first_s),
        }


def show_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def to_ns(seconds: float) -> int:
    return round(seconds * 1e9)


def make_line(value: Json) -> bytes:
    """Return one line of a stream."""
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"
