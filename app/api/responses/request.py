"""The request of POST /v1/responses, and how it is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from app.api.chat import ChatInput
from app.api.errors import refuse
from app.api.fields import check_unknown, warn
from app.api.protocol import MAX_MESSAGES, MAX_TOOLS, SHARED, ChatFields, Fields, Integer, check_choice
from app.api.responses.conversation import Conversation
from app.api.responses.tools import Tools, read_chosen
from app.api.tools.use import read_choice

Json = dict[str, Any]

PASSED = SHARED | {"stop", "top_k"}
# name of a field of a chat -> its name here
NAMES = {
    "messages": "input", "max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens",
    "response_format": "text", "reasoning_effort": "reasoning.effort", "prompt": "input",
}
# reasoning option -> its fixed value here
REASONING_VALUES = {"context": ("auto", "current_turn", "all_turns"), "mode": ("standard",)}
LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
INCLUDES = (LOGPROBS, ENCRYPTED)


class TextFormat(Fields):
    """text.format: OpenAI's response_format, flat."""

    PLACE = ("text", "format")

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(Fields):
    """Options of the text's format."""

    PLACE = ("text",)

    format: TextFormat = Field(default_factory=TextFormat)
    verbosity: str | None = None


class StreamOptions(Fields):
    """Options of a stream. Usage is always included, obfuscation never, whatever include_obfuscation requests."""

    PLACE = ("stream_options",)

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
    # limits the calls that a service makes: none here
    max_tool_calls: Integer | None = Field(default=None, ge=0, le=2**31 - 1)
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    @property
    def wants_summary(self) -> bool:
        """Whether the reasoning is to be sent as its summary, which is all of it."""
        asked = self.reasoning or {}
        return bool(asked.get("summary") or asked.get("generate_summary"))

    @property
    def wants_encrypted(self) -> bool:
        return ENCRYPTED in (self.include or ())


class CountRequest(ResponsesRequest):
    """POST /v1/responses/input_tokens: a request, of which only the prompt is made."""

    input: str | Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES)] = ""


def read_request(body: ResponsesRequest, tools: Tools, before: Sequence[Json] = ()) -> ChatInput:
    """Return the input of the equivalent chat.

    Args:
        before: the items of the conversation that the input continues.

    Raises ApiError: 400 for a field that cannot be honoured.
    """
    _check_unsupported(body)
    fields: Json = {n: v for n, v in (body.model_extra or {}).items() if n in PASSED}
    messages = Conversation(body.instructions, body.input, before).messages
    fields |= {
        "model": body.model, "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature, "top_p": body.top_p,
        "response_format": _read_format(body.text.format), "parallel_tool_calls": body.parallel_tool_calls,
        "stream": body.stream, "logprobs": LOGPROBS in (body.include or ()) or bool(body.top_logprobs),
        "top_logprobs": body.top_logprobs, "reasoning_effort": _read_effort(body.reasoning or {}),
    }
    choice = read_choice(body.tool_choice, bool(tools.tools), read_chosen, is_nested=False)
    return ChatInput(ChatFields.read(fields, NAMES), messages, tools.tools, choice, NAMES)


def _check_unsupported(body: ResponsesRequest) -> None:
    for name in body.include or ():
        if name not in INCLUDES:
            warn(f"include {name[:80]!r} was left out: there is no such output here")
    check_choice(("truncation",), body.truncation or "disabled", ("auto", "disabled"))
    if body.truncation == "auto":
        warn("truncation 'auto' has no effect: an input that is too long is refused")


def _read_effort(reasoning: Json) -> Any:
    """Return the reasoning effort; other options of `reasoning` have no effect."""
    check_unknown(reasoning, ("effort", "summary", "generate_summary", *REASONING_VALUES), ("reasoning",))
    for name, values in REASONING_VALUES.items():
        if reasoning.get(name) not in (None, *values):
            rule = f"={str(reasoning[name])[:40]!r} is not supported; it can be {' or '.join(values)}"
            raise refuse(("reasoning", name), rule, "unsupported_field")
    return reasoning.get("effort")


def _read_format(asked: TextFormat) -> Json | None:
    if asked.type != "json_schema" and asked.schema_ is not None:
        raise refuse(("text", "format", "schema"), f" is a part of the type json_schema, not {asked.type}")
    if asked.type != "json_schema":
        return None if asked.type == "text" else {"type": asked.type}
    if asked.schema_ is None:
        raise refuse(("text", "format", "schema"), " is required", "missing_field")
    return {"type": "json_schema", "json_schema": {"name": asked.name, "schema": asked.schema_}}
