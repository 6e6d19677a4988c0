"""ResponseWriter: the response of POST /v1/responses and its events.

created ─▶ in_progress ─▶ per item: output_item.added ─▶ (content_part.added ─▶ output_text.delta ... done ─▶
content_part.done | the same with reasoning_text | function_call_arguments.delta ... done) ─▶ output_item.done
─▶ completed | incomplete
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any, ClassVar

from app.api import replies
from app.api.blocks import BlockWriter
from app.api.call import Call
from app.api.errors import ApiError
from app.api.responses.request import RENAMED, ResponsesRequest
from engine import CompletionOutput, RequestOutput

Json = dict[str, Any]
ECHOED = ("instructions", "max_output_tokens", "reasoning", "previous_response_id")
# an item of text -> the type of its part, the prefix of its id, further fields of the item and of its part
TEXTS: dict[str, tuple[str, str, Json, Json]] = {
    "message": ("output_text", "msg", {"role": "assistant"}, {"annotations": [], "logprobs": []}),
    "reasoning": ("reasoning_text", "rs", {"summary": []}, {}),
}


class ResponseWriter(BlockWriter):
    """Writes one response.

    Args:
        keep: stores the response, before its last event is sent.
    """

    TYPES: ClassVar = {"reasoning": "reasoning", "content": "message", "tool_calls": "function_call"}
    RENAMED = RENAMED

    def __init__(
        self, call: Call, body: ResponsesRequest, keep: Callable[[Json], None] = lambda reply: None
    ) -> None:
        super().__init__(call)
        self._body = body
        self._keep = keep
        self._sequence_number = 0
        self._logprobs: list[Json] = []
        self._num_told = 0  # log probabilities that events have had

    def begin(self, output: RequestOutput | None) -> None:
        self.tell("response.created", response=self._describe("in_progress", [], None))
        self.ping()

    def ping(self) -> None:
        self.tell("response.in_progress", response=self._describe("in_progress", [], None))

    def end(self, output: RequestOutput, choice: CompletionOutput, num_tokens: int) -> Json:
        if not self.blocks:
            self.open("message")
        status = status_of(choice)
        # items and events have two of the states of a response
        kind = "completed" if status == "completed" else "incomplete"
        self.close(kind)
        extras = replies.structured_of(self.call, output)
        reply = self._describe(status, self.blocks, self._count(output, num_tokens)) | extras
        self._keep(reply)
        self.tell(f"response.{kind}", response=reply)
        return reply

    def frame_error(self, error: ApiError) -> bytes:
        body = error.body["error"]
        # the object `error` makes the official client raise it
        self.tell("error", code=body["code"], message=body["message"], param=body["param"], error=body)
        return self._take()

    def make_block(self, kind: str, call_id: str, name: str) -> Json:
        if kind == "function_call":
            more: Json = {"call_id": call_id, "name": name, "arguments": ""}
            prefix = "fc"
        else:
            _, prefix, more, _ = TEXTS[kind]
            more = more | {"content": []}
        return {"type": kind, "id": f"{prefix}_{uuid.uuid4().hex}", **more, "status": "in_progress"}

    def tell_open(self, block: Json) -> None:
        self.tell("response.output_item.added", output_index=len(self.blocks) - 1, item=block)
        if block["type"] in TEXTS:
            part = _make_part(block["type"], "")
            self.tell("response.content_part.added", **self._place(), content_index=0, part=part)

    def tell_growth(self, kind: str, text: str) -> None:
        if kind in TEXTS:
            more: Json = {}
            if kind == "message":
                more = {"logprobs": self._logprobs[self._num_told :]}
                self._num_told = len(self._logprobs)
            self.tell(
                f"response.{TEXTS[kind][0]}.delta", **self._place(), content_index=0, delta=text, **more
            )
        else:
            self.tell("response.function_call_arguments.delta", **self._place(), delta=text)

    def tell_end(self, block: Json, text: str, status: str) -> None:
        block["status"] = status
        if block["type"] in TEXTS:
            part, place = _make_part(block["type"], text), {**self._place(), "content_index": 0}
            more = {"logprobs": self._logprobs} if block["type"] == "message" else {}
            part |= more
            self.tell(f"response.{part['type']}.done", **place, text=text, **more)
            self.tell("response.content_part.done", **place, part=part)
            block["content"] = [part]
        else:
            block["arguments"] = text
            kind = "response.function_call_arguments.done"
            self.tell(kind, **self._place(), name=block["name"], arguments=text)
        self.tell("response.output_item.done", output_index=len(self.blocks) - 1, item=block)

    def tell(self, kind: str, **fields: Any) -> None:
        """Add a numbered event."""
        super().tell(kind, sequence_number=self._sequence_number, **fields)
        self._sequence_number += 1

    def _feed(self, choice: CompletionOutput) -> None:
        if found := replies.chat_logprobs(self.call, choice):
            self._logprobs += found["content"]
        super()._feed(choice)

    def _place(self) -> Json:
        return {"item_id": self.blocks[-1]["id"], "output_index": len(self.blocks) - 1}

    def _count(self, output: RequestOutput, num_output: int) -> Json:
        """Return the usage under this route's names."""
        num_input = len(output.prompt_token_ids)
        return {
            "input_tokens": num_input,
            # cached tokens are billed separately elsewhere; here they are free
            "input_tokens_details": {"cached_tokens": output.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": replies.num_reasoning_tokens(self.call) or 0},
            "total_tokens": num_input + num_output,
        }

    def _describe(self, status: str, items: list[Json], usage: Json | None) -> Json:
        """Return the response object."""
        call, body = self.call, self._body
        is_parallel = body.parallel_tool_calls is not False if call.tools is None else call.tools.is_parallel
        return {
            "id": call.reply_id,
            "object": "response",
            "created_at": call.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": call.model,
            "output": items,
            "parallel_tool_calls": is_parallel,
            "store": body.store is not False,
            "temperature": call.sampling.temperature,
            "text": body.text.model_dump(by_alias=True, exclude_none=True),
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": call.sampling.top_p,
            "truncation": "disabled",
            "usage": usage,
            "metadata": body.metadata or {},
            **{name: getattr(body, name) for name in ECHOED},
        }


def status_of(choice: CompletionOutput) -> str:
    """Return how a response ended: by itself, at a limit, or aborted."""
    if choice.finish_reason == "abort":
        return "cancelled"
    return "completed" if choice.finish_reason == "stop" else "incomplete"


def _make_part(kind: str, text: str) -> Json:
    part_type, _, _, more = TEXTS[kind]
    return {"type": part_type, "text": text, **more}
