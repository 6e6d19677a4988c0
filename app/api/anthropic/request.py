"""The request of POST /v1/messages, and how it becomes a chat request: one path through the engine for both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from app.api.anthropic.messages import is_prefill, read_messages
from app.api.anthropic.tools import read_tools
from app.api.errors import ApiError, BadRequest
from app.api.fields import check_choice, check_unknown, read_text
from app.api.protocol import MAX_MESSAGES, MAX_TOOLS, SHARED, ChatRequest, Fields, Integer, read_whole

Json = dict[str, Any]

# name of a field in a chat request -> its name here
RENAMED = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config",
}
# Anthropic's client reads this in the error and then sends the whole conversation by itself
NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
CHOICE_FIELDS = ("type", "disable_parallel_tool_use")
TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
OUTPUT_CONFIG = ("format", "effort")
EFFORTS = ("low", "medium", "high", "xhigh", "max")
# type of thinking -> what may stand beside it
THINKING_FIELDS = {
    "enabled": ("type", "budget_tokens", "display"),
    "disabled": ("type",),
    "adaptive": ("type", "display"),
}
DISPLAYS = ("summarized", "omitted")
MIN_BUDGET_TOKENS = 1024  # the protocol's own


class MessagesRequest(Fields):
    """POST /v1/messages; fields of chat completions not named here are in PASSED."""

    PASSED = SHARED | {"thread"}

    model: str
    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Integer
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = False
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: float | None = None
    top_k: Integer | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None


class CountRequest(MessagesRequest):
    """POST /v1/messages/count_tokens: a message request, of which only the prompt is made."""

    max_tokens: Integer = 1


def make_chat_request(body: MessagesRequest) -> tuple[ChatRequest, dict[str, str]]:
    """Return the equivalent chat request, and the places in it under this route's names.

    Raises:
        ApiError: 400 for a field that cannot be honoured.
    """
    extra = body.model_extra or {}
    if extra.get("thread"):
        message = "thread is not supported: send the whole conversation with every request"
        raise ApiError(400, message, "thread", "unsupported_field", details={"details": NO_THREADS})
    fields = {name: value for name, value in extra.items() if name in SHARED}
    messages = read_messages(body.system, body.messages)
    goes_on = is_prefill(messages)
    if goes_on and not str(messages[-1]["content"]).strip():
        goes_on = False  # an empty beginning cannot be continued
        messages = messages[:-1] or messages
    fields |= {
        "model": body.model,
        "messages": messages,
        "continue_final_message": goes_on,
        "add_generation_prompt": not goes_on,
        "max_completion_tokens": body.max_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "stop": body.stop_sequences,
        "stream": body.stream,
        "response_format": _read_format(body),
        "reasoning_effort": _read_effort(body.output_config),
        **_read_thinking(body.thinking, fields),
    }
    tools = read_tools(body.tools or ())
    chat = ChatRequest.read(fields | _read_choice(body.tool_choice or {}, list(tools.values())))
    places = {f"tools[{i}].function": place for i, place in enumerate(tools)}
    return chat, places | {f"{theirs}.parameters": f"{ours}.input_schema" for theirs, ours in places.items()}


def _read_choice(choice: Json, tools: list[Json]) -> Json:
    """Return the fields of a chat request about tools."""
    wanted, is_single = _read_choice_type(choice), choice.get("disable_parallel_tool_use")
    if not tools:
        if wanted not in ("auto", "none"):
            raise BadRequest(f"tool_choice.type={choice['type']!r} needs tools", "tool_choice", None)
        return {}
    is_parallel = None if is_single is None else is_single is not True
    return {"tools": tools, "tool_choice": wanted, "parallel_tool_calls": is_parallel}


def _read_choice_type(choice: Json) -> str | Json:
    kind = choice.get("type", "auto")
    if kind == "tool":
        name = read_text("tool_choice.name", choice.get("name"))
        check_unknown(choice, (*CHOICE_FIELDS, "name"), "tool_choice", None)
        return {"type": "function", "function": {"name": name}}
    check_choice("tool_choice.type", kind, [*TOOL_CHOICES, "tool"])
    check_unknown(choice, CHOICE_FIELDS, "tool_choice", None)
    return TOOL_CHOICES[kind]


def _read_format(body: MessagesRequest) -> Json | None:
    """The schema of output_config.format, or of output_format, its older name."""
    config = body.output_config or {}
    check_unknown(config, OUTPUT_CONFIG, "output_config")
    asked = config.get("format")
    if asked is not None and body.output_format is not None and asked != body.output_format:
        message = "output_config.format and output_format, its older name, ask for different things"
        raise BadRequest(message, "output_format", "too_many_constraints")
    where = "output_format" if asked is None else "output_config.format"
    asked = body.output_format if asked is None else asked
    if asked is None:
        return None
    schema = asked.get("schema") if isinstance(asked, dict) else None
    if schema is None or asked.get("type") != "json_schema":
        message = 'output_config.format must be {"type": "json_schema", "schema": ...}'
        raise BadRequest(message, "output_config")
    check_unknown(asked, ("type", "schema"), where)
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}


def _read_effort(config: Json | None) -> str | None:
    """Return the reasoning effort, which the chat template reads."""
    effort: str | None = (config or {}).get("effort")
    if effort is not None:
        check_choice("output_config.effort", effort, EFFORTS)
    return effort


def _read_thinking(thinking: Json | None, fields: Mapping[str, Any]) -> Json:
    """The chat fields about thoughts: the template's switch, and whether the reply shows them.

    Args:
        fields: the chat fields that the request names itself; its chat_template_kwargs come first.

    Raises:
        ApiError: 400 for what is malformed.
    """
    if thinking is None:
        return {}
    kind = thinking.get("type")
    check_choice("thinking.type", kind, THINKING_FIELDS)
    check_unknown(thinking, THINKING_FIELDS[str(kind)], "thinking")
    # The budget is a target in the protocol, too, not a limit: max_tokens bounds reasoning and content here.
    budget = read_whole(thinking.get("budget_tokens"))
    if budget is not None and (type(budget) is not int or budget < MIN_BUDGET_TOKENS):
        message = (
            f"thinking.budget_tokens={repr(budget)[:40]} must be an integer of at least {MIN_BUDGET_TOKENS}"
        )
        raise BadRequest(message, "thinking")
    display, kwargs = thinking.get("display"), fields.get("chat_template_kwargs")
    if display is not None:
        check_choice("thinking.display", display, DISPLAYS)
    found: Json = {"include_reasoning": False} if display == "omitted" else {}
    # adaptive is the model's default; chat_template_kwargs that are not an object are rejected later
    if kind != "adaptive" and (kwargs is None or isinstance(kwargs, dict)):
        # templates of models that think take it; the others ignore it
        found["chat_template_kwargs"] = {"enable_thinking": kind == "enabled", **(kwargs or {})}
    return found
