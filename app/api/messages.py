"""Chat messages as clients send them, turned into what the engine reads: role, text and images."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from app.api.errors import ApiError, BadRequest, refuse
from app.api.fields import warn
from app.api.parts import Json, make_text, read_parts
from app.api.protocol import ChatRequest, OtherReasoning, OtherThinking, check_choice, read_text
from app.api.wording import Path, say_place
from app.extraction.json_spans import scan
from app.json_text import TOO_MANY_VALUES, ValueCounter, check_values
from app.reasoning import SWITCHES
from engine import refuse_reserved_kwargs

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_KWARGS = 32
MAX_TOOL_CALLS = 128
MAX_NAME_CHARS = 256


def read_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages of a chat completion as `read_message` does."""
    counter = ValueCounter()
    return [read_message(("messages", i), message, counter) for i, message in enumerate(messages)]


def show_messages(messages: Sequence[Mapping[str, Any]], sees_images: bool = False) -> list[dict[str, Any]]:
    """Join content parts for a chat template; a user's content with images stays a list of parts.

    Chat templates have images in a user's content only: those in results of tools follow the results as the user's.

    Args:
        messages: as `read_message` returns them.
        sees_images: whether the model takes images; otherwise a text stands for each.
    """
    result: list[dict[str, Any]] = []
    shown: list[dict[str, Any]] = []  # images of the results before the next message
    for message in messages:
        role, parts = message["role"], message["content"]
        if shown and role != "tool":
            if role == "user":
                parts = [*shown, *parts]
            else:
                result.append({"role": "user", "content": shown})
            shown = []
        if role != "user" and sees_images:
            images = [part for part in parts if part["type"] == "image_url" and role == "tool"]
            shown += images
            parts = [make_text("[image: it follows]") if part in images else part for part in parts]
        texts = [_show(part, sees_images and role == "user") for part in parts]
        result.append({**message, "content": join_texts(texts)})
    return [*result, {"role": "user", "content": shown}] if shown else result


def join_texts(parts: list[Json]) -> str | list[Json]:
    """Return parts as one text if they are nothing else; two parts are never one word or number."""
    return parts if any(part["type"] != "text" for part in parts) else "\n".join(part["text"] for part in parts)


def _show(part: dict[str, Any], sees_images: bool) -> dict[str, Any]:
    """Return a part that the model can read: a text stands for all that it cannot."""
    if part["type"] == "text" or (sees_images and part["type"] == "image_url"):
        return part
    what = part["text"] if part["type"] == "unseen" else part["type"].removesuffix("_url")
    warn(f"the model cannot see this part of the messages: {what}")
    return make_text(f"[{what}: the model cannot see it]")


def has_files(message: Mapping[str, Any]) -> bool:
    """Return whether a message that was read has files."""
    return any(part["type"] == "file" for part in message["content"])


def has_tool_messages(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a conversation that was read holds calls or their results."""
    return any(message["role"] == "tool" or "tool_calls" in message for message in messages)


def read_message(where: Path, message: Mapping[str, Any], counter: ValueCounter) -> dict[str, Any]:
    """Return a chat message whose content is a list of parts, and whose calls have objects as arguments.

    Args:
        counter: counts the values in the arguments of all calls, which are strings in the body.
    """
    message = _as_tools(message)
    role = message.get("role")
    check_choice((*where, "role"), role, ROLES)
    content = message.get("content")
    if content is None and role in ("assistant", "tool"):
        content = message.get("refusal") or ""
    # OpenAI's newer name for a system message; chat templates know only the old one
    is_history = role in ("assistant", "tool")
    plain = [{"type": "text", "text": content}]
    read = {
        "role": "system" if role == "developer" else role,
        "content": plain if isinstance(content, str) else read_parts((*where, "content"), content, is_history),
    }
    if (name := message.get("name")) is not None:
        if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME_CHARS:
            raise refuse((*where, "name"), f" must be a text of 1 to {MAX_NAME_CHARS} characters")
        read["name"] = name  # a template decides whether to write it
    if isinstance(call := message.get("function_call"), dict):  # OpenAI's older form of one call
        if role != "assistant":
            raise refuse((*where, "function_call"), " is a part of an assistant's message")
        older = {"id": f"call_{call.get('name')}", "function": call}
        read["tool_calls"] = [_read_call(where, older, counter, "function_call")]
    elif calls := message.get("tool_calls"):
        place = (*where, "tool_calls")
        if role != "assistant" or not isinstance(calls, list) or len(calls) > MAX_TOOL_CALLS:
            raise refuse(place, f" must be a list of at most {MAX_TOOL_CALLS}, of an assistant")
        read["tool_calls"] = [_read_call((*place, i), call, counter) for i, call in enumerate(calls)]
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if role == "assistant" and reasoning is not None:
        # chat templates leave out reasoning that is no longer worth reading
        read["reasoning_content"] = read_text((*where, "reasoning_content"), reasoning)
    if role == "tool":
        read["tool_call_id"] = read_text((*where, "tool_call_id"), message.get("tool_call_id"))
    return read


def _as_tools(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message with OpenAI's older function calls as one with tool calls."""
    if message.get("role") == "function":
        return {**message, "role": "tool", "tool_call_id": f"call_{message.get('name')}"}
    return message


def _read_call(where: Path, call: object, counter: ValueCounter, name: str = "") -> dict[str, Any]:
    """Return a call as chat templates read it; `name` is the client's name of its function."""
    kind = "custom" if isinstance(call, dict) and isinstance(call.get("custom"), dict) else "function"
    given = call.get(kind) if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(given, dict):
        raise refuse(where, ' must be {"id": ..., "type": "function", "function": {...}}')
    inner = (*where, name or kind)
    if kind == "custom":
        arguments = {"input": read_text((*inner, "input"), given.get("input"))}
    else:
        arguments = parse_arguments((*inner, "arguments"), given.get("arguments"), counter)
    called = read_text((*inner, "name"), given.get("name"))
    return make_call(read_text((*where, "id"), call.get("id")), called, arguments)


def make_call(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a call as chat templates read it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def parse_arguments(where: Path, given: object, counter: ValueCounter) -> dict[str, Any]:
    """Return the arguments of a call, which are written as JSON; an object stands for itself."""
    if given is None or isinstance(given, dict):
        return given or {}
    text = read_text(where, given)
    counter.feed(text.encode())
    if counter.is_over:
        message = f"{say_place(where)}: the text of all calls' arguments {TOO_MANY_VALUES}"
        raise ApiError(413, message, str(where[0]), "body_too_large")
    # chat templates write them with tojson, which would put a text into quotes once more
    arguments = read_arguments(text or "{}")
    if arguments is None:
        raise refuse(where, " must be the text of a JSON object")
    return arguments


def read_arguments(text: str) -> dict[str, Any] | None:
    """Return the arguments of a call; of a cut text, the part that is there; None if it is not an object."""
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        cut = scan(text)
        arguments = cut.value if cut.is_json else None
    try:
        check_values(arguments)
    except (ValueError, RecursionError):
        return None
    return arguments if isinstance(arguments, dict) else None


def read_template_kwargs(kwargs: Mapping[str, Any] | None, effort: str | None = None) -> dict[str, Any]:
    """Variables for the chat template; names that would change what the renderer does are refused.

    Args:
        effort: the request's reasoning_effort, whose variables `kwargs` may set otherwise.
    """
    refuse_reserved_kwargs(kwargs or ())
    if kwargs and len(kwargs) > MAX_KWARGS:
        raise BadRequest(f"chat_template_kwargs has more than {MAX_KWARGS} entries", "chat_template_kwargs", None)
    known: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if effort == "none" and not any(name in (kwargs or {}) for name in SWITCHES):
        known |= dict.fromkeys(SWITCHES, False)
    return known | dict(kwargs or {})


def read_reasoning(body: ChatRequest) -> ChatRequest:
    """Return a request with other servers' names for the switch and the effort of the reasoning under its own."""
    asked, thinking, kwargs = body.reasoning or OtherReasoning(), body.thinking, body.chat_template_kwargs or {}
    if isinstance(thinking, OtherThinking):
        thinking = {"enabled": True, "disabled": False}.get(thinking.type)
    is_on = next((each for each in (thinking, body.enable_thinking, asked.enabled) if each is not None), None)
    if is_on is not None and not any(name in kwargs for name in SWITCHES):
        kwargs = kwargs | dict.fromkeys(SWITCHES, is_on)
    return body.model_copy(update={
        "reasoning_effort": body.reasoning_effort or asked.effort, "chat_template_kwargs": kwargs,
        "include_reasoning": body.include_reasoning is not False and not asked.exclude,
    })


def write_as_text(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the conversation with calls as JSON in the assistant's content, and their results in the user's.

    Consecutive results and the user's message after them become one message, because many templates need turns.

    Args:
        messages: as `read_messages` returns them.
    """
    result: list[dict[str, Any]] = []
    names: dict[str, str] = {}  # id of a call -> name of its function
    was_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        plain = _write_result(message, names) if is_result else _write_calls(message)
        if result and was_result and plain["role"] == "user" and isinstance(plain["content"], str):
            result[-1]["content"] += "\n" + plain["content"]
        else:
            result.append(plain)
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}
        was_result = result[-1]["role"] == "user" and (is_result or was_result)
    return result


def _write_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose calls are lines of its content, each as a forced call is written."""
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ())]
    if not calls:
        return dict(message)
    lines = [message["content"]] if message["content"] else []
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return kept | {"content": "\n".join((*lines, *calls))}


def _write_result(message: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    name = message.get("name") or names.get(message["tool_call_id"])
    start = f"Result of {name}" if name else "Result"
    return {"role": "user", "content": f"{start}: {message['content']}"}
