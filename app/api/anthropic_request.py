"""The request of POST /v1/messages, and how it becomes a chat request: one path through the engine for both."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from app.api.errors import ApiError, describe_fields
from app.api.fields import check_extra_fields
from app.api.protocol import MAX_MESSAGES, MAX_TOOLS, ChatRequest

Json = dict[str, Any]

# the chat fields that this route takes under their own names
PASSED = frozenset(
    {"cache_salt", "chat_template_kwargs", "deadline_s", "min_p", "priority", "request_id", "seed"}
    | {"include_reasoning", "structured_outputs"}
)
# what a chat request calls a field -> what it is called here
RENAMED = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config",
}
# fields of the protocol that change nothing in what a text model of ours writes
IGNORED = frozenset({"betas", "cache_control", "metadata", "service_tier", "inference_geo"})
UNSUPPORTED = {
    "container": "there are no containers here",
    "mcp_servers": "tools are called by the client here",
    "context_management": "send the conversation as it is to be read",
}
TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
THOUGHTS = ("thinking", "redacted_thinking")


class MessagesRequest(BaseModel):
    """POST /v1/messages; fields of chat completions not named here are in PASSED."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: str
    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: int
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = False
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: float | None = None
    top_k: int | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None


class CountRequest(BaseModel):
    """POST /v1/messages/count_tokens: what of a message request makes its prompt."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str
    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[dict[str, Any]] | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: dict[str, Any] | None = None

    def as_request(self) -> MessagesRequest:
        """The request whose prompt is counted."""
        return MessagesRequest(max_tokens=1, **self.model_dump())


def make_chat_request(body: MessagesRequest) -> ChatRequest:
    """The chat request that does what this one asks for.

    Raises:
        ApiError: 400 for a field that cannot be honoured.
    """
    fields = _check_extra(body.model_extra or {})
    fields |= {
        "model": body.model,
        "messages": [*_read_system(body.system), *_read_messages(body.messages)],
        "max_completion_tokens": body.max_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "stop": body.stop_sequences,
        "stream": body.stream,
        "response_format": _read_format(body),
        "chat_template_kwargs": _read_thinking(body.thinking, fields.get("chat_template_kwargs")),
    }
    if body.tools:
        choice = dict(body.tool_choice or {})
        fields["tools"] = [_read_tool(f"tools[{i}]", tool) for i, tool in enumerate(body.tools)]
        fields["tool_choice"] = _read_choice(choice)
        fields["parallel_tool_calls"] = choice.get("disable_parallel_tool_use") is not True
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:
        raise describe_fields(error.errors()) from error


def _check_extra(extra: Mapping[str, Any]) -> Json:
    for name, value in extra.items():
        if name in UNSUPPORTED and value:
            message = f"{name} is not supported: {UNSUPPORTED[name]}"
            raise ApiError(400, message, name, "unsupported_field")
        if name in ChatRequest.model_fields and name not in PASSED:
            raise ApiError(400, f"{name} is not a field of this route", name, "unknown_field")
    known = {name: value for name, value in extra.items() if name in PASSED}
    check_extra_fields({n: v for n, v in extra.items() if n not in PASSED | IGNORED | UNSUPPORTED.keys()})
    return known


def _read_system(system: str | list[Json] | None) -> list[Json]:
    if not system:
        return []
    text = system if isinstance(system, str) else "".join(_text_of("system", system))
    return [{"role": "system", "content": text}]


def _read_messages(messages: Iterable[Json]) -> list[Json]:
    read: list[Json] = []
    for i, message in enumerate(messages):
        where, role, content = f"messages[{i}]", message.get("role"), message.get("content")
        if role not in ("user", "assistant"):
            text = f"{where}.role={str(role)[:40]!r} must be user or assistant; the system has its own field"
            raise ApiError(400, text, "messages", "invalid_value")
        if isinstance(content, str):
            read.append({"role": role, "content": content})
        elif isinstance(content, list):
            read += (_read_user if role == "user" else _read_assistant)(f"{where}.content", content)
        else:
            text = f"{where}.content must be a text or a list of blocks"
            raise ApiError(400, text, "messages", "invalid_value")
    return read


def _read_user(where: str, blocks: list[Json]) -> list[Json]:
    """Results of tools are messages of their own for a chat template, before what else the user says."""
    results, words = [], []
    for i, block in enumerate(blocks):
        if _kind_of(block) == "tool_result":
            content = block.get("content") or ""
            text = content if isinstance(content, str) else "".join(_text_of(f"{where}[{i}]", content))
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
        else:
            words += _text_of(f"{where}[{i}]", [block])
    return [*results, {"role": "user", "content": "".join(words)}] if words or not results else results


def _read_assistant(where: str, blocks: list[Json]) -> list[Json]:
    words: list[str] = []
    calls: list[Json] = []
    for i, block in enumerate(blocks):
        if _kind_of(block) == "tool_use":
            arguments = json.dumps(block.get("input", {}), ensure_ascii=False)
            function = {"name": block.get("name"), "arguments": arguments}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif _kind_of(block) not in THOUGHTS:
            words += _text_of(f"{where}[{i}]", [block])
    message: Json = {"role": "assistant", "content": "".join(words)}
    return [message | {"tool_calls": calls} if calls else message]


def _kind_of(block: object) -> str:
    return str(block.get("type", "")) if isinstance(block, dict) else ""


def _text_of(where: str, blocks: Iterable[Any]) -> list[str]:
    """The texts of text blocks."""
    found = []
    for block in blocks:
        text = block.get("text") if _kind_of(block) == "text" else None
        if not isinstance(text, str):
            message = f"{where}: only text is supported here, not {(_kind_of(block) or 'this')[:40]!r}"
            raise ApiError(400, message, where.split("[")[0].split(".")[0], "unsupported_content")
        found.append(text)
    return found


def _read_tool(where: str, tool: Json) -> Json:
    if tool.get("type", "custom") != "custom":
        message = f"{where}.type={str(tool['type'])[:40]!r} is not supported: tools are called by the client"
        raise ApiError(400, message, "tools", "unsupported_field")
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _read_choice(choice: Json) -> str | Json:
    kind = choice.get("type", "auto")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if kind not in TOOL_CHOICES:
        message = f"tool_choice.type={str(kind)[:40]!r} must be one of {', '.join([*TOOL_CHOICES, 'tool'])}"
        raise ApiError(400, message, "tool_choice", "invalid_value")
    return TOOL_CHOICES[kind]


def _read_format(body: MessagesRequest) -> Json | None:
    """The schema of output_config.format, or of output_format, its older name."""
    asked = (body.output_config or {}).get("format") or body.output_format
    if asked is None:
        return None
    schema = asked.get("schema") if isinstance(asked, dict) else None
    if schema is None or asked.get("type") != "json_schema":
        message = 'output_config.format must be {"type": "json_schema", "schema": ...}'
        raise ApiError(400, message, "output_config", "invalid_value")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}


def _read_thinking(thinking: Json | None, kwargs: Json | None) -> Json | None:
    """Chat templates of models that think take enable_thinking; the others ignore it."""
    if thinking is None or thinking.get("type") not in ("enabled", "disabled"):
        return kwargs
    return {"enable_thinking": thinking["type"] == "enabled", **(kwargs or {})}
