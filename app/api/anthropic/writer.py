"""MessageWriter: the message of POST /v1/messages and its events.

message_start ─▶ per block: content_block_start ─▶ content_block_delta ... ─▶ content_block_stop
              ─▶ message_delta (stop reason, usage) ─▶ message_stop
"""

from __future__ import annotations

import json
from typing import Any, ClassVar

from app.api.blocks import BlockWriter
from app.api.call import Choice
from app.api.errors import ApiError
from app.json_text import check_values
from engine import RequestOutput

Json = dict[str, Any]
# type of a block -> its delta and the field that grows
DELTAS = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "tool_use": ("input_json_delta", "partial_json"),
}

# Clients send reasoning back only if it is signed; this server does not check the signature.
SIGNATURE = "troupe"


class MessageWriter(BlockWriter):
    """Writes one message."""

    TYPES: ClassVar = {"reasoning": "thinking", "content": "text", "function": "tool_use"}

    def begin(self, output: RequestOutput | None) -> None:
        num_prompt = len(self.call.prompts[0] if output is None else output.prompt_token_ids)
        num_cached = 0 if output is None else output.num_cached_tokens  # message_delta has the final number
        self.add_event("message_start", message=self._describe(usage_of(num_prompt, num_cached, 0)))

    def ping(self) -> None:
        self.add_event("ping")

    def end(self, choice: Choice) -> Json:
        self.close()
        stop, output = stop_of(choice, self.has_calls), choice.output
        usage = usage_of(len(output.prompt_token_ids), output.num_cached_tokens, len(choice.token_ids))
        extras = self.call.describe_grammar([choice])
        self.add_event("message_delta", delta=stop, usage=usage, **extras)
        self.add_event("message_stop")
        return self._describe(usage) | {"content": self.blocks} | stop | extras

    def frame_error(self, error: ApiError) -> bytes:
        body = error.anthropic_body
        self.add_event("error", error=body["error"], request_id=body["request_id"])
        return self._take()

    def make_block(self, kind: str, call_id: str, name: str) -> Json:
        if kind == "tool_use":
            return {"type": kind, "id": call_id, "name": name, "input": {}}
        return {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})

    def add_open(self, block: Json) -> None:
        self.add_event("content_block_start", index=len(self.blocks) - 1, content_block=block)

    def add_growth(self, kind: str, text: str) -> None:
        delta, name = DELTAS[kind]
        self.add_event("content_block_delta", index=len(self.blocks) - 1, delta={"type": delta, name: text})

    def add_end(self, block: Json, text: str, status: str) -> None:
        if block["type"] == "tool_use":
            block["input"] = _read_input(text)
        else:
            block[block["type"]] = text
        if block["type"] == "thinking":
            block["signature"] = SIGNATURE
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            self.add_event("content_block_delta", index=len(self.blocks) - 1, delta=delta)
        self.add_event("content_block_stop", index=len(self.blocks) - 1)

    def _describe(self, usage: Json) -> Json:
        """Return the message before its first token."""
        return {
            "id": self.call.reply_id, "type": "message", "role": "assistant", "model": self.call.model,
            "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage,
        }


def stop_of(choice: Choice, has_calls: bool) -> Json:
    """Return why a message ended, in this API's terms."""
    sequence = choice.stop_reason if isinstance(choice.stop_reason, str) else None
    if choice.finish_reason == "length":
        reason = "max_tokens"
    elif choice.finish_reason == "abort":
        reason = "abort"  # this API has no word for it, and "end_turn" would be wrong
    elif sequence is not None:
        reason = "stop_sequence"
    else:
        reason = "tool_use" if has_calls else "end_turn"
    return {"stop_reason": reason, "stop_sequence": sequence}


def usage_of(num_prompt: int, num_cached: int, num_output: int) -> Json:
    """Return the usage; tokens found in the prefix cache are not part of the input, as in this API."""
    return {
        "input_tokens": num_prompt - num_cached, "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached, "output_tokens": num_output,
    }


def _read_input(text: str) -> Json:
    """Return the arguments of a call; empty for a call that the token limit cut off."""
    try:
        arguments = json.loads(text or "{}")
        check_values(arguments)
    except json.JSONDecodeError:
        return {}
    except (ValueError, RecursionError):
        message = (
            "the model called a tool with arguments that no JSON can hold: "
            "a number too large, an unpaired surrogate, or too many levels"
        )
        raise ApiError(500, message, code="generation_failed") from None
    return arguments if isinstance(arguments, dict) else {}
