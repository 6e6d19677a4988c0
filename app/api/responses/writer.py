"""ResponseWriter: the response of POST /v1/responses and its events.

created ─▶ in_progress ─▶ the events of each item (`events.py`) ─▶ completed | incomplete
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from app.api.blocks import BlockWriter
from app.api.call import Call, Choice, Delta
from app.api.errors import ApiError
from app.api.responses import events
from app.api.responses.conversation import seal
from app.api.responses.request import ResponsesRequest
from app.api.responses.tools import describe_tool
from engine import RequestOutput

Json = dict[str, Any]
ECHOED = (
    "instructions", "max_output_tokens", "max_tool_calls", "previous_response_id", "prompt_cache_key",
    "safety_identifier",
)


class ResponseWriter(BlockWriter):
    """Writes one response.

    Args:
        names: name of a function for the model -> its fields in an item, where they differ.
        keep: stores the response, before its last event is sent.
        has_logprobs: the output is one message, whose log probabilities are those of the output.
    """

    TYPES: ClassVar = {
        "reasoning": "reasoning", "content": "message", "function": "function_call", "custom": "custom_tool_call"
    }

    def __init__(
        self, call: Call, body: ResponsesRequest, names: Mapping[str, Json],
        keep: Callable[[Json], None] = lambda reply: None, has_logprobs: bool = True,
    ) -> None:
        super().__init__(call)
        self._body = body
        self._names = names
        self._keep = keep
        self._has_logprobs = has_logprobs
        self._sequence_number = 0
        self._logprobs: list[Json] = []
        self._num_sent = 0  # log probabilities that events have had

    def begin(self, output: RequestOutput | None) -> None:
        self.add_event("response.created", response=self._describe("in_progress", [], None))
        self.ping()

    def ping(self) -> None:
        self.add_event("response.in_progress", response=self._describe("in_progress", [], None))

    def end(self, choice: Choice) -> Json:
        if not self.blocks:
            self.open("message")
        status = status_of(choice)
        # items and events have two of the states of a response
        kind = "completed" if status == "completed" else "incomplete"
        self.close(kind)
        extras = self.call.describe_grammar([choice])
        reply = self._describe(status, self.blocks, self._count(choice)) | extras
        self._keep(reply)
        self.add_event(f"response.{kind}", response=reply)
        return reply

    def frame_error(self, error: ApiError) -> bytes:
        body = error.body["error"]
        # the object `error` makes the official client raise it
        self.add_event("error", code=body["code"], message=body["message"], param=body["param"], error=body)
        return self._take()

    def make_block(self, kind: str, call_id: str, name: str) -> Json:
        if kind in events.CALLS:
            _, field, prefix = events.CALLS[kind]
            more: Json = {"call_id": call_id, "name": name} | self._names.get(name, {}) | {field: ""}
        elif kind == "message":
            prefix, more = "msg", {"role": "assistant", "content": []}
        else:
            prefix, more = "rs", {"summary": []} | ({} if self._body.wants_summary else {"content": []})
        if name in self._names and self._names[name].get("type") == events.SHELL_CALL:
            prefix, more = "lsh", {"type": events.SHELL_CALL, "call_id": call_id, "action": events.read_action("")}
        return {"type": kind, "id": f"{prefix}_{uuid.uuid4().hex}", **more, "status": "in_progress"}

    def add_open(self, block: Json) -> None:
        self._add_events(events.open_item(len(self.blocks) - 1, dict(block)))

    def add_growth(self, kind: str, text: str) -> None:
        if self.blocks[-1]["type"] == events.SHELL_CALL:
            return
        more: Json = {}
        if kind == "message":
            more = {"logprobs": self._logprobs[self._num_sent :]}
            self._num_sent = len(self._logprobs)
        self._add_events([events.grow_item(len(self.blocks) - 1, self.blocks[-1], text, **more)])

    def add_end(self, block: Json, text: str, status: str) -> None:
        block["status"] = status
        more = {"logprobs": self._logprobs} if block["type"] == "message" else {}
        if block["type"] in events.CALLS:
            block[events.CALLS[block["type"]][1]] = text
        elif block["type"] == events.SHELL_CALL:
            block["action"] = events.read_action(text)
        else:
            field = "summary" if events.is_summary(block) else "content"
            block[field] = [events.make_part(block, text) | more]
            if block["type"] == "reasoning" and self._body.wants_encrypted:
                block["encrypted_content"] = seal(text)
        self._add_events(events.end_item(len(self.blocks) - 1, block, text, **more))

    def _add_events(self, found: Iterable[events.Event]) -> None:
        for kind, fields in found:
            self.add_event(f"response.{kind}", **fields)

    def add_event(self, kind: str, **fields: Any) -> None:
        super().add_event(kind, sequence_number=self._sequence_number, **fields)
        self._sequence_number += 1

    def add_delta(self, delta: Delta) -> None:
        if self._has_logprobs and (found := self.call.describe_logprobs(delta.gained.logprobs)):
            self._logprobs += found["content"]
        super().add_delta(delta)

    def _count(self, choice: Choice) -> Json:
        """Return the usage under this route's names."""
        num_input, num_output = len(choice.output.prompt_token_ids), len(choice.token_ids)
        return {
            "input_tokens": num_input,
            # cached tokens are billed separately elsewhere; here they are free
            "input_tokens_details": {"cached_tokens": choice.output.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": choice.num_reasoning_tokens},
            "total_tokens": num_input + num_output,
        }

    def _describe(self, status: str, items: list[Json], usage: Json | None) -> Json:
        """Return the response object."""
        call, body = self.call, self._body
        is_parallel = body.parallel_tool_calls is not False if call.tools is None else call.tools.is_parallel
        return {
            "id": call.reply_id, "object": "response", "created_at": call.created,
            "completed_at": int(time.time()) if status == "completed" else None, "status": status,
            "background": False, "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": call.model, "output": items, "parallel_tool_calls": is_parallel,
            "store": body.store is not False, "service_tier": "default", "temperature": call.sampling.temperature,
            "presence_penalty": call.sampling.presence_penalty, "frequency_penalty": call.sampling.frequency_penalty,
            "top_logprobs": body.top_logprobs or 0,
            "reasoning": None if body.reasoning is None else {"effort": None, "summary": None} | body.reasoning,
            "text": body.text.model_dump(by_alias=True, exclude_none=True), "tool_choice": body.tool_choice or "auto",
            "tools": [describe_tool(tool) for tool in body.tools or ()], "top_p": call.sampling.top_p,
            "truncation": body.truncation or "disabled", "usage": usage, "metadata": body.metadata or {},
            **{name: getattr(body, name) for name in ECHOED},
        }


def status_of(choice: Choice) -> str:
    """Return how a response ended: by itself, at a limit, or aborted."""
    if choice.finish_reason == "abort":
        return "cancelled"
    return "completed" if choice.finish_reason == "stop" else "incomplete"
