"""Parses tool calls in streamed text into OpenAI's format.

A grammar guarantees the format of calls, so arguments are sent at once: the part that a client has received is always
the beginning of valid JSON.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import Any, Protocol

from app.api.tools.styled_calls import CALL_TEXTS, StyledCalls, form_of
from app.api.tools.use import ToolUse
from grammar import GrammarError, OutputCheck, SchemaValidator, ToolStyle, list_raw, list_tool_styles

Json = dict[str, Any]

# one call, or an array of them, as `make_forced_tags` describes it
FORCED = ToolStyle(("[", ""), separator=", ", end="]", is_whole=True)
TEXTS = frozenset(("content", "reasoning", "reasoning_content"))  # fields of a delta that are concatenated


class ToolParser(Protocol):
    """Reads one choice; `num_calls` is the number of calls so far."""

    @property
    def num_calls(self) -> int: ...

    def feed(self, text: str) -> Json:
        """Return the delta for more text; empty if nothing can be sent yet."""
        ...

    def close(self, is_cut: bool = False) -> Json:
        """Return the delta of the withheld text, of which the beginning of a call is left out if it was cut."""
        ...


class ConvertedCalls(ABC):
    """A ToolParser that changes the deltas of another one."""

    def __init__(self, inner: ToolParser) -> None:
        self._inner = inner

    @property
    def num_calls(self) -> int:
        return self._inner.num_calls

    def feed(self, text: str) -> Json:
        return self._convert(self._inner.feed(text))

    def close(self, is_cut: bool = False) -> Json:
        return self._convert(self._inner.close(is_cut))

    @abstractmethod
    def _convert(self, delta: Json) -> Json:
        """Return a delta in another form."""


def make_parser(tools: ToolUse) -> ToolParser:
    """Return the parser for the call format of these tools."""
    if tools.spec is not None:
        return StyledCalls(FORCED, {})
    assert tools.style is not None, "tools that are not forced are called in a style"
    style = list_tool_styles()[tools.style]
    raw = {tool.name: list_raw(tool.parameters, style.parameter or "") for tool in tools.tools}
    return StyledCalls(style, raw, tools.answer is not None, tools.shows_reasoning)


def make_message(parser: ToolParser, text: str, is_cut: bool = False) -> Json:
    """Return the message of a complete text: its content (None if empty), reasoning and calls."""
    message: Json = {"role": "assistant", "content": None, "refusal": None}
    calls: list[Json] = []
    for delta in (parser.feed(text), parser.close(is_cut)):
        for name in TEXTS & delta.keys():
            message[name] = (message.get(name) or "") + delta[name]
        for part in delta.get("tool_calls", ()):
            form = form_of(part)
            if "id" in part:
                calls.append({**part, form: dict(part[form])})
                del calls[-1]["index"]
            else:
                calls[-1][form][CALL_TEXTS[form]] += part[form][CALL_TEXTS[form]]
        if more := delta.get("function_call"):
            known = message.setdefault("function_call", {"arguments": ""})
            message["function_call"] = known | more | {"arguments": known["arguments"] + more["arguments"]}
    return message | {"tool_calls": calls} if calls else message


def is_valid(tools: ToolUse, text: str) -> bool | None:
    """Return whether calls fit the tools' schemas, or an answer its own schema; None if neither can be validated."""
    message = make_message(make_parser(tools), text)
    schemas = {tool.name: tool.parameters for tool in tools.tools}
    try:
        if "tool_calls" not in message and tools.answer is not None:
            return OutputCheck(tools.answer.spec).is_valid(message["content"] or "")
        calls = [call["function"] for call in message.get("tool_calls", ())]
        found = [
            SchemaValidator(schemas[each["name"]]).is_valid(json.loads(each["arguments"])) for each in calls
        ]
        return bool(found) and all(found)
    except GrammarError:
        return None  # a schema that the engines accept and the validator does not
    except (ValueError, KeyError):
        return False
