"""Finding tool calls in the text of an output, as it comes, and telling them as OpenAI's deltas.

StyledCalls   calls in a format that a grammar guarantees, forced ones too: arguments are passed on at once, so that
              what a client has of them is always the beginning of valid JSON
TaggedCalls   content and `<tool_call>{...}</tool_call>`, the format of hermes and qwen, without a grammar: a call is
              passed on once it is complete and valid, and stays text otherwise
"""

from __future__ import annotations

import json
from typing import Any, Protocol

from app.api.marks import overlap
from app.api.tools.styled_calls import StyledCalls, open_call
from app.api.tools.use import ToolUse
from engine import is_unicode
from grammar import GrammarError, OutputCheck, SchemaValidator, ToolStyle, list_raw, list_tool_styles

Json = dict[str, Any]

# one call, or an array of them, as `make_forced_tags` describes it
FORCED = ToolStyle(("[", ""), separator=", ", end="]", is_whole=True)
TEXTS = frozenset(("content", "reasoning", "reasoning_content"))  # the names of a delta that add up
OPEN_TAG = "<tool_call>"
CLOSE_TAG = "</tool_call>"


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
    if tools.style is None:
        return TaggedCalls(tools.names)
    style = list_tool_styles()[tools.style]
    raw = {tool.name: list_raw(tool.parameters, style.parameter or "") for tool in tools.tools}
    return StyledCalls(style, raw, tools.answer is not None)


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


class TaggedCalls:
    """Keeps words and calls apart; only calls of known tools with arguments that are an object count."""

    def __init__(self, names: frozenset[str]) -> None:
        self.num_calls = 0
        self._names = names
        self._words: list[str] = []
        self._parts: list[Json] = []
        self._held: list[str] = []  # what came since the opening tag
        self._tail = ""  # the end of the text, which may be the beginning of a tag
        self._is_in_call = False
        self._is_after_call = False

    def feed(self, text: str) -> Json:
        """The words and the complete calls in more text."""
        text = self._tail + text
        start = 0
        # by position: cutting the text at every tag would copy the rest of it as often
        while (end := text.find(tag := CLOSE_TAG if self._is_in_call else OPEN_TAG, start)) >= 0:
            self._take(text[start:end])
            self._turn()
            start = end + len(tag)
        held = max(start, len(text) - overlap(text, tag))
        self._take(text[start:held])
        self._tail = text[held:]
        return self._flush()

    def close(self) -> Json:
        """What was held back: models often leave out the last closing tag."""
        self._take(self._tail)
        self._tail = ""
        if self._is_in_call:
            self._turn(closing="")
        return self._flush()

    def _take(self, text: str) -> None:
        if self._is_in_call:
            self._held.append(text)
            return
        if self._is_after_call:
            # line breaks between and after calls belong to the form
            text = text.lstrip()
            self._is_after_call = not text
        self._words.append(text)

    def _turn(self, closing: str = CLOSE_TAG) -> None:
        """Step over a tag."""
        self._is_in_call = not self._is_in_call
        if self._is_in_call:
            return
        held = "".join(self._held)
        self._held = []
        call = _read_call(held, self._names)
        if call is None:
            self._take(OPEN_TAG + held + closing)
            return
        self._parts.append(open_call(self.num_calls, *call))
        self.num_calls += 1
        self._is_after_call = True

    def _flush(self) -> Json:
        words, parts = "".join(self._words), self._parts
        self._words, self._parts = [], []
        return ({"content": words} if words else {}) | ({"tool_calls": parts} if parts else {})


def _read_call(text: str, names: frozenset[str]) -> tuple[str, str] | None:
    """Name and arguments of a call, or None for what is none."""
    try:
        call = json.loads(text)
        arguments = call.get("arguments") if isinstance(call, dict) else None
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if not isinstance(arguments, dict) or call.get("name") not in names:
            return None
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        return (call["name"], written) if is_unicode(written) else None
    except (ValueError, RecursionError, TypeError):
        return None
