"""Tool calls in the text of an output, as it comes, in OpenAI's form.

A grammar guarantees how calls are written, so their arguments are passed on at once: what a client has of them is
always the beginning of valid JSON.
"""

from __future__ import annotations

import json
from typing import Any, Protocol

from app.api.tools.styled_calls import StyledCalls
from app.api.tools.use import ToolUse
from grammar import GrammarError, OutputCheck, SchemaValidator, ToolStyle, list_raw, list_tool_styles

Json = dict[str, Any]

# one call, or an array of them, as `make_forced_tags` describes it
FORCED = ToolStyle(("[", ""), separator=", ", end="]", is_whole=True)
TEXTS = frozenset(("content", "reasoning", "reasoning_content"))  # the names of a delta that add up


class ToolParser(Protocol):
    """Reads one choice; `num_calls` of it were calls so far."""

    @property
    def num_calls(self) -> int: ...

    def feed(self, text: str) -> Json:
        """The delta for more text; empty when there is nothing to tell yet."""
        ...

    def close(self) -> Json:
        """The delta for what was held back."""
        ...


def make_parser(tools: ToolUse) -> ToolParser:
    """The parser for the way in which these tools are called."""
    if tools.spec is not None:
        return StyledCalls(FORCED, {})
    assert tools.style is not None, "tools that are not forced are called in a style"
    style = list_tool_styles()[tools.style]
    raw = {tool.name: list_raw(tool.parameters, style.parameter or "") for tool in tools.tools}
    return StyledCalls(style, raw, tools.answer is not None, tools.shows_reasoning)


def make_message(parser: ToolParser, text: str) -> Json:
    """The message of a whole text: its words, None without any, its thoughts and its calls."""
    message: Json = {"role": "assistant", "content": None, "refusal": None}
    calls: list[Json] = []
    for delta in (parser.feed(text), parser.close()):
        for name in TEXTS & delta.keys():
            message[name] = (message.get(name) or "") + delta[name]
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                calls.append({**part, "function": dict(part["function"])})
                del calls[-1]["index"]
            else:
                calls[-1]["function"]["arguments"] += part["function"]["arguments"]
    return message | {"tool_calls": calls} if calls else message


def is_valid(tools: ToolUse, text: str) -> bool | None:
    """Return whether calls fit the tools' schemas, or an answer beside them its own; None if nothing can tell."""
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
        return None  # a schema that the engines read and the validator does not
    except (ValueError, KeyError):
        return False
