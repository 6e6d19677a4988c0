"""Finding tool calls in the text of an output, as it comes, and telling them as OpenAI's deltas.

ForcedCalls   the whole text is calls, which a grammar guarantees: arguments are passed on at once, so that
              what a client has of them is always the beginning of valid JSON
TaggedCalls   words with `<tool_call>{...}</tool_call>` among them, as hermes and qwen write it, guaranteed by
              nobody: a call is passed on when it is complete and proves to be one, and stays text otherwise
"""

from __future__ import annotations

import json
import re
import uuid
from typing import Any, Protocol

from app.api.tools import ToolUse

Json = dict[str, Any]

HEAD = re.compile(r'[\s\[,}]*\{\s*"name"\s*:\s*"([\w-]+)"\s*,\s*"arguments"\s*:\s*(?=\{)')
OPEN_TAG = "<tool_call>"
CLOSE_TAG = "</tool_call>"


class ToolParser(Protocol):
    """Reads one choice.

    Attributes:
        num_calls: calls that were told so far.
    """

    num_calls: int

    def feed(self, text: str) -> Json:
        """The delta for more text; empty when there is nothing to tell yet."""
        ...

    def close(self) -> Json:
        """The delta for what was held back."""
        ...


def make_parser(tools: ToolUse) -> ToolParser:
    """The parser for the way in which these tools are called."""
    return TaggedCalls(tools.names) if tools.spec is None else ForcedCalls()


def make_message(tools: ToolUse, text: str) -> Json:
    """The message of a whole text: its words, None without any, and its calls."""
    parser = make_parser(tools)
    message: Json = {"role": "assistant", "content": None, "refusal": None}
    calls: list[Json] = []
    for delta in (parser.feed(text), parser.close()):
        if "content" in delta:
            message["content"] = (message["content"] or "") + delta["content"]
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                calls.append({**part, "function": dict(part["function"])})
                del calls[-1]["index"]
            else:
                calls[-1]["function"]["arguments"] += part["function"]["arguments"]
    return message | {"tool_calls": calls} if calls else message


def _open_call(index: int, name: str, arguments: str) -> Json:
    return {
        "index": index,
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


class ForcedCalls:
    """Splits one call, or an array of them, into names and arguments."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._head = ""
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False

    def feed(self, text: str) -> Json:
        """The parts of calls in more text."""
        parts: list[Json] = []
        while text:
            if self._depth == 0:
                self._head += text
                match = HEAD.match(self._head)
                if match is None:
                    break
                parts.append(_open_call(self.num_calls, match[1], ""))
                self.num_calls += 1
                text, self._head = self._head[match.end() :], ""
            end = self._find_end(text)
            parts.append({"index": self.num_calls - 1, "function": {"arguments": text[:end]}})
            text = text[end:]
        return {"tool_calls": parts} if parts else {}

    def close(self) -> Json:
        """Nothing: whatever is left is brackets."""
        return {}

    def _find_end(self, text: str) -> int:
        """Where the arguments end in this text: its length when they go on."""
        for position, char in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_in_string:
                self._is_escaped = char == "\\"
                self._is_in_string = char != '"'
            elif char == '"':
                self._is_in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return position + 1
        return len(text)


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
        held = max(start, len(text) - _overlap(text, tag))
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
        self._parts.append(_open_call(self.num_calls, *call))
        self.num_calls += 1
        self._is_after_call = True

    def _flush(self) -> Json:
        words, parts = "".join(self._words), self._parts
        self._words, self._parts = [], []
        return ({"content": words} if words else {}) | ({"tool_calls": parts} if parts else {})


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of the text that begins the tag."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)


def _read_call(text: str, names: frozenset[str]) -> tuple[str, str] | None:
    """Name and arguments of a call, or None for what is none."""
    try:
        call = json.loads(text)
        arguments = call.get("arguments") if isinstance(call, dict) else None
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if not isinstance(arguments, dict) or call.get("name") not in names:
            return None
        return call["name"], json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError, TypeError):
        return None
