"""StyledCalls: splits streamed text into content and tool calls."""

from __future__ import annotations

import re
import uuid
from enum import Enum
from typing import Any

from app.api.marks import overlap
from app.api.tools.styles import ToolStyle

Json = dict[str, Any]

# longer than any name with what stands around it
MAX_HEAD_CHARS = 256


class Brackets:
    """Finds the end of a JSON object or array in a text that comes in pieces."""

    def __init__(self) -> None:
        self.depth = 0
        self._is_in_string = False
        self._is_escaped = False

    def find_end(self, text: str, start: int = 0) -> int:
        """Where the value that goes on at `start` ends in this text: its length when it goes on after it."""
        for position in range(start, len(text)):
            char = text[position]
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_in_string:
                self._is_escaped = char == "\\"
                self._is_in_string = char != '"'
            elif char == '"':
                self._is_in_string = True
            elif char in "{[":
                self.depth += 1
            elif char in "}]":
                self.depth -= 1
                if self.depth == 0:
                    return position + 1
        return len(text)


class Part(Enum):
    """What the text is at the moment."""

    WORDS = 0
    HEAD = 1  # from the beginning of a call up to its arguments
    ARGUMENTS = 2
    TAIL = 3  # from the end of the arguments to the end of the call, or to the next


class StyledCalls:
    """Splits a text that a grammar has shaped; what does not fit all the same stays words."""

    def __init__(self, style: ToolStyle) -> None:
        self.num_calls = 0
        self._style = style
        self._opens = re.compile("|".join(map(re.escape, style.opens)))
        self._part = Part.WORDS
        self._head = style.head
        self._text = ""  # what has not been told yet
        self._at = 0  # how much of it has, in the middle of `feed`
        self._brackets = Brackets()
        self._is_after_call = False
        self._words: list[str] = []
        self._calls: list[Json] = []

    def feed(self, text: str) -> Json:
        """The words and the parts of calls in more text."""
        self._text += text
        # by position: cutting the text at every part would copy the rest of it as often
        while self._at < len(self._text) and self._advance():
            pass
        self._text, self._at = self._text[self._at :], 0
        return self._flush()

    def close(self) -> Json:
        """What was held back; a call that was cut short before its arguments is words."""
        if self._part is not Part.TAIL or not self._is_tail_begun():
            self._say(self._text)
        self._text = ""
        return self._flush()

    def _advance(self) -> bool:
        """Take what is certain from the text; False when more of it has to come first."""
        match self._part:
            case Part.WORDS:
                return self._take_words()
            case Part.HEAD:
                return self._take_head()
            case Part.ARGUMENTS:
                return self._take_arguments()
            case Part.TAIL:
                return self._take_tail()

    def _take_words(self) -> bool:
        found = self._opens.search(self._text, self._at)
        if found is not None:
            self._say(self._text[self._at : found.start()])
            self._at = found.start()
            self._part, self._head = Part.HEAD, self._style.head
            return True
        end = self._text[max(self._at, len(self._text) - MAX_HEAD_CHARS) :]
        held = max(overlap(end, mark) for mark in self._style.opens)
        self._say(self._text[self._at : len(self._text) - held])
        self._at = len(self._text) - held
        return False

    def _take_head(self) -> bool:
        found = self._head.match(self._text, self._at)
        if found is None:
            if len(self._text) - self._at <= MAX_HEAD_CHARS:
                return False
            # no call after all: step over its first character and look on
            self._say(self._text[self._at])
            self._at += 1
            self._part = Part.WORDS
            return True
        self._calls.append(open_call(self.num_calls, found[1], ""))
        self.num_calls += 1
        self._at = found.end()
        self._part = Part.ARGUMENTS
        return True

    def _take_arguments(self) -> bool:
        end = self._brackets.find_end(self._text, self._at)
        self._calls.append(more_arguments(self.num_calls - 1, self._text[self._at : end]))
        self._at = end
        if self._brackets.depth == 0:
            self._part, self._is_after_call = Part.TAIL, True
        return True

    def _take_tail(self) -> bool:
        separator, close = self._style.separator, self._style.close
        if self._text.startswith(close, self._at):
            self._at += len(close)
            self._part = Part.WORDS
        elif close.startswith(self._text[self._at :]):
            return False  # the separator may be the beginning of the end
        elif separator is not None and self._text.startswith(separator, self._at):
            self._at += len(separator)
            self._part, self._head = Part.HEAD, self._style.next_head
        elif self._is_tail_begun():
            return False
        else:
            self._part = Part.WORDS
        return True

    def _is_tail_begun(self) -> bool:
        rest = self._text[self._at : self._at + MAX_HEAD_CHARS]
        return any(tail.startswith(rest) for tail in (self._style.separator, self._style.close) if tail)

    def _say(self, text: str) -> None:
        if self._is_after_call:
            # line breaks between and after calls belong to the form
            text = text.lstrip()
            self._is_after_call = not text
        if text:
            self._words.append(text)

    def _flush(self) -> Json:
        words, calls = "".join(self._words), self._calls
        self._words, self._calls = [], []
        return ({"content": words} if words else {}) | ({"tool_calls": calls} if calls else {})


def open_call(index: int, name: str, arguments: str) -> Json:
    """The first delta of a call."""
    return {
        "index": index,
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def more_arguments(index: int, text: str) -> Json:
    """A further delta of a call."""
    return {"index": index, "function": {"arguments": text}}


def join_parts(delta: Json) -> Json:
    """The same delta with one part a call: clients exist that read only the first part of a chunk."""
    if "tool_calls" not in delta:
        return delta
    joined: list[Json] = []
    for part in delta["tool_calls"]:
        if joined and joined[-1]["index"] == part["index"]:
            function = joined[-1]["function"]
            arguments = function["arguments"] + part["function"]["arguments"]
            joined[-1] = joined[-1] | {"function": function | {"arguments": arguments}}
        else:
            joined.append(part)
    return delta | {"tool_calls": joined}
