"""OpenAI's older `functions` and `function_call`, as tools of which one is called at a time."""

from __future__ import annotations

from typing import Any

from app.api.errors import BadRequest
from app.api.protocol import ChatRequest
from app.api.tools.calls import ConvertedCalls

Json = dict[str, Any]


def read_functions(body: ChatRequest) -> ChatRequest:
    """Return the same request with tools.

    Raises:
        ApiError: 400 for functions beside tools, or a choice that is malformed.
    """
    if body.tools is not None or body.tool_choice is not None:
        raise BadRequest("functions is the older name of tools: give one of them", "functions")
    choice: Any = body.function_call
    if isinstance(choice, dict):
        choice = {"type": "function", "function": choice}
    tools = [{"type": "function", "function": function} for function in body.functions or ()]
    update = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
    return body.model_copy(update=update)


class FunctionCalls(ConvertedCalls):
    """A ToolParser whose deltas have the call as `function_call`."""

    def _convert(self, delta: Json) -> Json:
        call: Json = {}
        for part in delta.pop("tool_calls", ()):
            function = part["function"]
            call |= function | {"arguments": call.get("arguments", "") + function["arguments"]}
        return delta | ({"function_call": call} if call else {})
