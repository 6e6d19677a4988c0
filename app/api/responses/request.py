"""The request of POST /v1/responses, translated to a chat request so that both take one path through the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from app.api.errors import BadRequest
from app.api.fields import check_unknown
from app.api.protocol import MAX_MESSAGES, MAX_TOOLS, SHARED, ChatRequest, Fields, Integer

Json = dict[str, Any]

PASSED = SHARED | {"stop", "top_k"}
# name in a chat request -> name on this route
RENAMED = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
    "reasoning_effort": "reasoning.effort",
}
# reasoning option -> its fixed value here
REASONING_VALUES = {"context": ("auto", "current_turn"), "mode": ("standard",)}
LOGPROBS = "message.output_text.logprobs"
INCLUDES = (LOGPROBS, "reasoning.encrypted_content")  # the second has no effect


class TextFormat(Fields):
    """text.format: OpenAI's response_format, flat."""

    PLACE = "text.format"

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(Fields):
    """Options of the text's format."""

    PLACE = "text"

    format: TextFormat = Field(default_factory=TextFormat)
    verbosity: str | None = None


class StreamOptions(Fields):
    """Options of a stream. Usage is always included, obfuscation never, whatever include_obfuscation requests."""

    PLACE = "stream_options"

    include_obfuscation: bool = False


class ResponsesRequest(Fields):
    """POST /v1/responses; fields of chat completions not named here are in PASSED."""

    PASSED = PASSED

    model: str | None = None
    input: str | Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Integer | None = None
    temperature: float | None = None
    top_p: float | None = None
    text: TextOptions = Field(default_factory=TextOptions)
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include: list[str] | None = None
    truncation: str | None = None
    metadata: dict[str, str] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    reasoning: dict[str, Any] | None = None
    store: bool | None = True
    previous_response_id: str | None = None
    top_logprobs: Integer | None = None


class Conversation:
    """A conversation, and the origin of each of its parts.

    Attributes:
        messages: in the format of a chat request, whose validation checks their content.
        places: location in those messages -> location in this request, for error messages.
    """

    def __init__(
        self,
        instructions: str | None,
        items: str | Sequence[Mapping[str, Any]],
        before: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.messages: list[Json] = []
        self.places: dict[str, str] = {}
        if instructions is not None:
            self._add("instructions", {"role": "system", "content": instructions})
        for item in before:
            self._add_item("previous_response_id", item)
        if isinstance(items, str):
            self._add("input", {"role": "user", "content": items})
            return
        for i, item in enumerate(items):
            self._add_item(f"input[{i}]", item)

    def _add_item(self, where: str, item: Mapping[str, Any]) -> None:
        match item.get("type") or "message":
            case "message":
                self._add(where, {"role": item.get("role"), "content": item.get("content")})
            case "function_call":
                self._add_call(where, item)
            case "function_call_output":
                result = {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
                place = self._add(where, result)
                self.places |= {
                    f"{place}.tool_call_id": f"{where}.call_id",
                    f"{place}.content": f"{where}.output",
                }
            case "reasoning":
                # clients send earlier output back; templates omit old reasoning as well
                return
            case kind:
                message = f"{where}: items of type {str(kind)[:40]!r} are not supported"
                raise BadRequest(message, "input", "unsupported_content")

    def _add_call(self, where: str, item: Mapping[str, Any]) -> None:
        # the calls of one turn are one message for a chat template
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self._add(where, {"role": "assistant", "content": None})
        calls = self.messages[-1].setdefault("tool_calls", [])
        place = f"messages[{len(self.messages) - 1}].tool_calls[{len(calls)}]"
        self.places |= {f"{place}.id": f"{where}.call_id", f"{place}.function": where}
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        calls.append({"id": item.get("call_id"), "type": "function", "function": function})

    def _add(self, where: str, message: Json) -> str:
        place = f"messages[{len(self.messages)}]"
        self.places[place] = where
        self.messages.append(message)
        return place


def make_chat_request(
    body: ResponsesRequest, before: Sequence[Json] = ()
) -> tuple[ChatRequest, dict[str, str]]:
    """Return the equivalent chat request, and the locations in it under this route's names.

    Args:
        before: the items of the conversation that the input continues.

    Raises:
        ApiError: 400 for a field that cannot be honoured.
    """
    _check_unsupported(body)
    fields: Json = {n: v for n, v in (body.model_extra or {}).items() if n in PASSED}
    conversation = Conversation(body.instructions, body.input, before)
    tools = body.tools or ()
    fields |= {
        "model": body.model,
        "messages": conversation.messages,
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "response_format": _read_format(body.text.format),
        "tools": None if body.tools is None else [_read_tool(i, tool) for i, tool in enumerate(tools)],
        "tool_choice": _read_choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "stream": body.stream,
        "logprobs": LOGPROBS in (body.include or ()) or bool(body.top_logprobs),
        "top_logprobs": body.top_logprobs,
        "reasoning_effort": _read_effort(body.reasoning or {}),
    }
    places = {f"tools[{i}].function": f"tools[{i}]" for i in range(len(tools))}
    return ChatRequest.read(fields), conversation.places | places


def _check_unsupported(body: ResponsesRequest) -> None:
    wrong = [name for name in body.include or () if name not in INCLUDES]
    if wrong:
        raise BadRequest(f"include {wrong[0][:80]!r} is not supported", "include", "unsupported_field")
    if body.truncation not in (None, "disabled"):
        message = "truncation is not supported: a conversation that is too long is refused"
        raise BadRequest(message, "truncation", "unsupported_field")


def _read_effort(reasoning: Json) -> Any:
    """Return the reasoning effort; other options of `reasoning` have no effect."""
    check_unknown(reasoning, ("effort", "summary", "generate_summary", *REASONING_VALUES), "reasoning")
    for name, values in REASONING_VALUES.items():
        if reasoning.get(name) not in (None, *values):
            told = f"reasoning.{name}={str(reasoning[name])[:40]!r}"
            message = f"{told} is not supported; it can be {' or '.join(values)}"
            raise BadRequest(message, "reasoning", "unsupported_field")
    return reasoning.get("effort")


def _read_format(asked: TextFormat) -> Json | None:
    if asked.type != "json_schema" and asked.schema_ is not None:
        raise BadRequest(f"text.format.schema is a part of the type json_schema, not {asked.type}", "text")
    if asked.type != "json_schema":
        return None if asked.type == "text" else {"type": asked.type}
    if asked.schema_ is None:
        raise BadRequest("text.format.schema is required", "text", "missing_field")
    return {"type": "json_schema", "json_schema": {"name": asked.name, "schema": asked.schema_}}


def _read_tool(i: int, tool: Mapping[str, Any]) -> Json:
    """Convert a tool: functions are flat here and nested in a chat request."""
    if tool.get("type") != "function":
        message = f'tools[{i}] must be {{"type": "function", "name": ..., "parameters": ...}}'
        raise BadRequest(message, "tools")
    return {"type": "function", "function": {key: tool[key] for key in tool if key not in ("type", "strict")}}


def _read_choice(choice: str | Mapping[str, Any] | None) -> str | Json | None:
    if choice is None or isinstance(choice, str):
        return choice
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        check_unknown(choice, ("type", "mode", "tools"), "tool_choice", None)
        tools = choice.get("tools")
        nested = [_read_choice(tool) for tool in tools] if isinstance(tools, list) else tools
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": nested}}
    if (
        not isinstance(choice, Mapping)
        or choice.get("type") != "function"
        or not isinstance(choice.get("name"), str)
    ):
        raise BadRequest('tool_choice must be {"type": "function", "name": ...}', "tool_choice")
    check_unknown(choice, ("type", "name"), "tool_choice", None)
    return {"type": "function", "function": {"name": choice["name"]}}
