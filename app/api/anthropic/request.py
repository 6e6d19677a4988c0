"""The request of POST /v1/messages, and how it is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from app.api.anthropic.messages import is_prefill, read_messages
from app.api.anthropic.tools import read_tools
from app.api.chat import ChatInput
from app.api.errors import ApiError, BadRequest, refuse
from app.api.fields import check_unknown
from app.api.protocol import (
    MAX_MESSAGES,
    MAX_TOOLS,
    SHARED,
    ChatFields,
    Fields,
    Integer,
    check_choice,
    read_text,
    read_whole,
)
from app.api.tools.use import CHOICE, ToolChoice
from app.api.wording import Path
from app.reasoning import SWITCHES

Json = dict[str, Any]

# name of a field of a chat -> its name here
NAMES = {"max_completion_tokens": "max_tokens", "stop": "stop_sequences", "response_format": "output_config"}
# Anthropic's client reads this in the error and then sends the whole conversation by itself
NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
CHOICE_FIELDS = ("type", "disable_parallel_tool_use")
TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
OUTPUT_CONFIG = ("format", "effort")
EFFORTS = ("low", "medium", "high", "xhigh", "max")
# type of thinking -> what may stand beside it
THINKING_FIELDS = {
    "enabled": ("type", "budget_tokens", "display"), "disabled": ("type",), "adaptive": ("type", "display")
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


def read_request(body: MessagesRequest) -> ChatInput:
    """Return the input of the equivalent chat."""
    extra = body.model_extra or {}
    if extra.get("thread"):
        message = "thread is not supported: send the whole conversation with every request"
        raise ApiError(400, message, "thread", "unsupported_field", details={"details": NO_THREADS})
    fields = {name: value for name, value in extra.items() if name in SHARED}
    messages = read_messages(body.system, body.messages)
    goes_on = is_prefill(messages)
    if goes_on and not "".join(part.get("text", "x") for part in messages[-1]["content"]).strip():
        goes_on = False  # an empty beginning cannot be continued
        messages = messages[:-1] or messages
    fields |= {
        "model": body.model, "continue_final_message": goes_on, "add_generation_prompt": not goes_on,
        "max_completion_tokens": body.max_tokens, "temperature": body.temperature, "top_p": body.top_p,
        "top_k": body.top_k, "stop": body.stop_sequences, "stream": body.stream,
        "response_format": _read_format(body), "reasoning_effort": _read_effort(body.output_config),
        **_read_thinking(body.thinking, fields),
    }
    tools = read_tools(body.tools or ())
    choice = _read_choice(body.tool_choice or {}, bool(tools))
    if (is_single := (body.tool_choice or {}).get("disable_parallel_tool_use")) is not None:
        fields["parallel_tool_calls"] = is_single is not True
    return ChatInput(ChatFields.read(fields, NAMES), messages, tools, choice, NAMES)


def _read_choice(choice: Json, has_tools: bool) -> ToolChoice:
    kind = choice.get("type", "auto")
    if kind == "tool":
        name = read_text((*CHOICE, "name"), choice.get("name"))
        check_unknown(choice, (*CHOICE_FIELDS, "name"), CHOICE, None)
    else:
        check_choice((*CHOICE, "type"), kind, [*TOOL_CHOICES, "tool"])
        check_unknown(choice, CHOICE_FIELDS, CHOICE, None)
    if not has_tools and kind not in ("auto", "none"):
        raise refuse((*CHOICE, "type"), f"={kind!r} needs tools", None)
    return ToolChoice("one", frozenset([name])) if kind == "tool" else ToolChoice(TOOL_CHOICES[kind])


def _read_format(body: MessagesRequest) -> Json | None:
    """The schema of output_config.format, or of output_format, its older name."""
    config = body.output_config or {}
    check_unknown(config, OUTPUT_CONFIG, ("output_config",))
    asked = config.get("format")
    if asked is not None and body.output_format is not None and asked != body.output_format:
        message = "output_config.format and output_format, its older name, ask for different things"
        raise BadRequest(message, "output_format", "too_many_constraints")
    where: Path = ("output_format",) if asked is None else ("output_config", "format")
    asked = body.output_format if asked is None else asked
    if asked is None:
        return None
    schema = asked.get("schema") if isinstance(asked, dict) else None
    if not isinstance(schema, dict | bool) or asked.get("type") != "json_schema":
        raise refuse(("output_config", "format"), ' must be {"type": "json_schema", "schema": ...}')
    check_unknown(asked, ("type", "schema"), where)
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}


def _read_effort(config: Json | None) -> str | None:
    """Return the reasoning effort, which the chat template reads."""
    effort: str | None = (config or {}).get("effort")
    if effort is not None:
        check_choice(("output_config", "effort"), effort, EFFORTS)
    return effort


def _read_thinking(thinking: Json | None, fields: Mapping[str, Any]) -> Json:
    """The chat fields about reasoning: the template's switch, and whether the reply shows them.

    Args:
        fields: the chat fields that the request names itself; its chat_template_kwargs come first.
    """
    if thinking is None:
        return {}
    kind = thinking.get("type")
    check_choice(("thinking", "type"), kind, THINKING_FIELDS)
    check_unknown(thinking, THINKING_FIELDS[str(kind)], ("thinking",))
    # The budget is a target in the protocol, too, not a limit: max_tokens bounds reasoning and content here.
    budget = read_whole(thinking.get("budget_tokens"))
    if budget is not None and (type(budget) is not int or budget < MIN_BUDGET_TOKENS):
        rule = f"={repr(budget)[:40]} must be an integer of at least {MIN_BUDGET_TOKENS}"
        raise refuse(("thinking", "budget_tokens"), rule)
    display, kwargs = thinking.get("display"), fields.get("chat_template_kwargs")
    if display is not None:
        check_choice(("thinking", "display"), display, DISPLAYS)
    found: Json = {"include_reasoning": False} if display == "omitted" else {}
    # adaptive is the model's default; chat_template_kwargs that are not an object are rejected later
    if kind != "adaptive" and (kwargs is None or isinstance(kwargs, dict)):
        # templates of models that think take it; the others ignore it
        given: Json = kwargs or {}
        switches = () if any(name in given for name in SWITCHES) else SWITCHES
        found["chat_template_kwargs"] = dict.fromkeys(switches, kind == "enabled") | given
    return found
