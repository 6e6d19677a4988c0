"""StyledCalls: splits streamed text into content, reasoning and tool calls."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from app.reasoning import overlap
from grammar import ToolStyle

# longer than any name with its delimiters
MAX_HEAD_CHARS = 256
SCALAR = re.compile(r"[-+.\w]+")
PYTHON = {"True": "true", "False": "false", "None": "null"}


class Piece(NamedTuple):
    """A piece of an answer.

    Attributes:
        kind: "reasoning" or "content"; of a call "function" or "custom", whose text is its arguments or its input.
        call: the number of the call.
        call_id, name: of the call, in its first piece only.
    """

    kind: str
    text: str
    call: int = -1
    call_id: str = ""
    name: str = ""


def join_pieces(pieces: Iterable[Piece]) -> list[Piece]:
    """Join neighbours of one kind and call: some clients read only the first piece in an event."""
    joined = []
    for _, group in groupby(pieces, attrgetter("kind", "call")):
        first, *rest = group
        joined.append(first._replace(text="".join((first.text, *(each.text for each in rest)))) if rest else first)
    return joined


class JsonEnd:
    """Finds the end of a JSON object, array or string in text that arrives in pieces."""

    def __init__(self) -> None:
        self.is_begun = False
        self.is_ended = False
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False

    def find(self, text: str, start: int = 0) -> int:
        """Return where the value that continues at `start` ends; the text's length if it continues after this text."""
        self.is_begun = True
        for position in range(start, len(text)):
            char = text[position]
            if self._is_escaped:
                self._is_escaped = False
                continue
            if self._is_in_string:
                self._is_escaped = char == "\\"
                self._is_in_string = char != '"'
            elif char == '"':
                self._is_in_string = True
                continue
            else:
                self._depth += (char in "{[") - (char in "}]")
            if not self._is_in_string and self._depth == 0:
                self.is_ended = True
                return position + 1
        return len(text)


@dataclass(frozen=True, slots=True)
class Patterns:
    """Patterns that find the parts of calls in a text.

    Attributes:
        marks: what begins the first call.
        head: from there up to the arguments; its group is the name.
        next_head: the same for a call right after another one.
        message: the beginning of a message, where an answer has several; its group is the channel.
        argument: one argument up to its value; its group is the key.
        after_value, after_arguments: what ends them.
        separator: what stands between two calls, None where text may.
        close: what ends the last of them.
    """

    marks: tuple[str, ...]
    head: re.Pattern[str]
    next_head: re.Pattern[str]
    message: re.Pattern[str]
    argument: re.Pattern[str]
    after_value: str
    after_arguments: str
    separator: str | None
    close: str


@cache
def make_patterns(style: ToolStyle) -> Patterns:
    """Return the patterns of a style."""

    number = rf"\d+{re.escape(style.number)}" if style.number else ""
    first = r"(?=\{)" if style.parameter is None else ""
    names = [re.escape(head).replace(r"\{name\}", r"([\w-]+)(?=[^\w-])") for head in style.heads]
    calls = f"(?:{'|'.join(names)}){number}{first}"
    channel = re.escape(style.channel).replace(r"\{channel\}", "(analysis|commentary|final)")
    before, _, after = (style.parameter or "{key}{value}").partition("{value}")
    key = re.escape(before).replace(r"\{key\}", r"([\w.$@-]+)")
    return Patterns(
        (style.next_message,) if style.channel else style.marks,
        re.compile(f"(?:{'|'.join(map(re.escape, style.openings))}){calls}"),
        re.compile(calls),
        re.compile(channel or "(?!)"),
        re.compile(f"(?:{re.escape(style.parameter_separator)})?{key}"),
        after,
        style.tail or style.end,
        None if style.separator is None else style.tail + style.separator,
        style.tail + style.end,
    )


class Part(Enum):
    """The kind of text that is being read."""

    START = 0  # the start of an answer that is either content or calls
    CONTENT = 1
    HEAD = 2  # from the beginning of a call or a message up to its content
    ARGUMENTS = 3  # one JSON object
    NEXT_ARGUMENT = 4  # the key of an argument, or the end of them
    TEXT_ARGUMENT = 5
    JSON_ARGUMENT = 6
    AFTER_ARGUMENT = 7
    TAIL = 8  # from the end of the arguments to the end of the call, or to the next
    REST = 9  # content without calls


class StyledCalls:
    """Splits text that follows a grammar; parts that do not match stay content.

    Args:
        raw: name of a tool -> its arguments that are written as text.
        is_whole: the text is either content or calls.
    """

    def __init__(
        self,
        style: ToolStyle,
        raw: Mapping[str, frozenset[str]],
        is_whole: bool = False,
        shows_reasoning: bool = True,
    ) -> None:
        self.num_calls = 0
        self._style, self._patterns = style, make_patterns(style)
        self._marks = re.compile("|".join(map(re.escape, self._patterns.marks)))
        self._raw = raw
        self._part = (
            Part.HEAD if style.channel else Part.START if is_whole or style.is_whole else Part.CONTENT
        )
        self._head = self._patterns.head
        self._text = ""  # text that has not been returned yet
        self._at = 0  # how much of it has been returned, during `feed`
        self._json = JsonEnd()
        self._name = ""  # name of the called tool
        self._num_arguments = 0
        self._is_reasoning, self._shows_reasoning = False, shows_reasoning
        self._is_after_call = False
        self._pieces: list[Piece] = []
        self._steps: dict[Part, Callable[[], bool]] = {
            Part.START: self._take_start,
            Part.CONTENT: self._take_content,
            Part.HEAD: self._take_head,
            Part.ARGUMENTS: self._take_arguments,
            Part.NEXT_ARGUMENT: self._take_key,
            Part.TEXT_ARGUMENT: self._take_text,
            Part.JSON_ARGUMENT: self._take_value,
            Part.AFTER_ARGUMENT: self._take_after,
            Part.TAIL: self._take_tail,
            Part.REST: self._take_rest,
        }

    def feed(self, text: str) -> list[Piece]:
        """Return the pieces of more text."""
        self._text += text
        # by position, because cutting the text at every part would copy the rest each time
        while self._at < len(self._text) and self._steps[self._part]():
            pass
        self._text, self._at = self._text[self._at :], 0
        return self._flush()

    def close(self, is_cut: bool = False) -> list[Piece]:
        """Return the withheld text.

        Args:
            is_cut: a limit or a stop string ended the text. The grammar wrote what begins a call then, so it is not
                content; free text that only looks like the beginning of a mark is.
        """
        is_free = self._part is Part.CONTENT and not self._is_after_call
        if self._style.channel and "|>" in self._text:
            is_free = False  # the special token that ends a message
        is_text = self._part in (Part.START, Part.CONTENT, Part.HEAD)
        if is_free or (is_text and not is_cut) or (self._part is Part.TAIL and not self._is_tail_begun()):
            self._say(self._text)
        self._text = ""
        return self._flush()

    def _take_start(self) -> bool:
        if any(mark.startswith(self._text) for mark in self._patterns.marks):
            return False
        self._part = Part.CONTENT if self._text.startswith(self._patterns.marks) else Part.REST
        return True

    def _take_rest(self) -> bool:
        self._say(self._text[self._at :])
        self._at = len(self._text)
        return False

    def _take_content(self) -> bool:
        found = self._marks.search(self._text, self._at)
        if found is not None:
            self._say(self._text[self._at : found.start()])
            # nothing else stands between two messages
            self._at = found.end() if self._style.channel else found.start()
            self._part, self._head = Part.HEAD, self._patterns.head
            return True
        end = self._text[max(self._at, len(self._text) - MAX_HEAD_CHARS) :]
        held = max(overlap(end, mark) for mark in self._patterns.marks)
        self._say(self._text[self._at : len(self._text) - held])
        self._at = len(self._text) - held
        return False

    def _take_head(self) -> bool:
        message = self._patterns.message.match(self._text, self._at)
        if message is not None:
            self._at, self._part = message.end(), Part.CONTENT
            self._is_reasoning = message[1] == "analysis"
            return True
        found = self._head.match(self._text, self._at)
        if found is None:
            if len(self._text) - self._at <= MAX_HEAD_CHARS:
                return False
            # not a call: skip its first character and continue
            self._say(self._text[self._at])
            self._at += 1
            self._part = Part.CONTENT
            return True
        self._name = next(filter(None, found.groups()))
        self._pieces.append(Piece("function", "", self.num_calls, f"call_{uuid.uuid4().hex[:24]}", self._name))
        self.num_calls += 1
        self._num_arguments = 0
        self._at = found.end()
        self._json = JsonEnd()
        self._part = Part.ARGUMENTS if self._style.parameter is None else Part.NEXT_ARGUMENT
        return True

    def _take_arguments(self) -> bool:
        if self._take_json():
            self._part, self._is_after_call = Part.TAIL, True
        return True

    def _take_json(self) -> bool:
        end = self._json.find(self._text, self._at)
        self._add(self._text[self._at : end])
        self._at = end
        return self._json.is_ended

    def _take_key(self) -> bool:
        found = self._patterns.argument.match(self._text, self._at)
        if found is not None:
            is_raw = found[1] in self._raw.get(self._name, ())
            self._add(f"{', ' if self._num_arguments else '{'}{json.dumps(found[1])}: {chr(34) * is_raw}")
            self._num_arguments += 1
            self._at, self._json = found.end(), JsonEnd()
            self._part = Part.TEXT_ARGUMENT if is_raw else Part.JSON_ARGUMENT
        elif self._text.startswith(self._patterns.after_arguments, self._at):
            self._add("}" if self._num_arguments else "{}")
            self._part, self._is_after_call = Part.TAIL, True
        elif len(self._text) - self._at > MAX_HEAD_CHARS:
            self._part = Part.TAIL
        else:
            return False
        return True

    def _take_text(self) -> bool:
        mark = self._patterns.after_value.rstrip()
        found = self._text.find(mark, self._at)
        end = found if found >= 0 else len(self._text) - overlap(self._text[self._at :][-len(mark) :], mark)
        self._add(escape(self._text[self._at : end]))
        self._at = end
        if found >= 0:
            self._add('"')
            self._part = Part.AFTER_ARGUMENT
        return found >= 0

    def _take_value(self) -> bool:
        scalar = SCALAR.match(self._text, self._at)
        if scalar is None or self._json.is_begun:
            if self._take_json():
                self._part = Part.AFTER_ARGUMENT
            return True
        if scalar.end() == len(self._text):
            return False
        self._add(PYTHON.get(scalar[0], scalar[0]))
        self._at, self._part = scalar.end(), Part.AFTER_ARGUMENT
        return True

    def _take_after(self) -> bool:
        after = self._patterns.after_value
        if self._text.startswith(after, self._at):
            self._at += len(after)
        elif after.startswith(self._text[self._at :]):
            return False
        self._part = Part.NEXT_ARGUMENT
        return True

    def _take_tail(self) -> bool:
        separator, close = self._patterns.separator, self._patterns.close
        if close and self._text.startswith(close, self._at):
            self._at += len(close)
            self._part = Part.CONTENT
        elif close.startswith(self._text[self._at :]):
            return False  # the separator may be a prefix of the end
        elif separator is not None and self._text.startswith(separator, self._at):
            self._at += len(separator)
            self._part, self._head = Part.HEAD, self._patterns.next_head
        elif self._is_tail_begun():
            return False
        else:
            self._part = Part.CONTENT
        return True

    def _is_tail_begun(self) -> bool:
        rest = self._text[self._at : self._at + MAX_HEAD_CHARS]
        tails = self._patterns.separator, self._patterns.close
        return any(tail.startswith(rest) for tail in tails if tail)

    def _say(self, text: str) -> None:
        if self._is_after_call:
            # line breaks between and after calls are part of the format
            text = text.lstrip()
            self._is_after_call = not text
        if text and (self._shows_reasoning or not self._is_reasoning):
            self._pieces.append(Piece("reasoning" if self._is_reasoning else "content", text))

    def _add(self, text: str) -> None:
        if text:
            self._pieces.append(Piece("function", text, self.num_calls - 1))

    def _flush(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return join_pieces(pieces) if len(pieces) > 1 else pieces


def escape(text: str) -> str:
    """Return a text as the content of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
