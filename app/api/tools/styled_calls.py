"""StyledCalls: splits streamed text into content, reasoning and tool calls."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

from app.api.tools.call_patterns import ValueEnd, make_patterns
from app.reasoning import overlap
from grammar import ArgumentReader, ToolStyle

# longer than any name with its delimiters
MAX_HEAD_CHARS = 384
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


class Part(Enum):
    """The kind of text that is being read."""

    START = 0  # the start of an answer that is either content or calls
    CONTENT = 1
    HEAD = 2  # from the beginning of a call or a message up to its content
    ARGUMENTS = 3  # one JSON object
    NEXT_ARGUMENT = 4  # the key of an argument, or the end of them
    TEXT_ARGUMENT = 5
    WHOLE_ARGUMENT = 6  # one that can be read only as a whole
    JSON_ARGUMENT = 7
    AFTER_ARGUMENT = 8
    ID = 9  # from the end of the arguments up to the id of the call
    TAIL = 10  # from there to the end of the call, or to the next
    REST = 11  # content without calls


class StyledCalls:
    """Splits text that follows a grammar; parts that do not match stay content.

    Args:
        tools: name of a tool -> the schema of its arguments.
        is_whole: the text is either content or calls.
    """

    def __init__(
        self, style: ToolStyle, tools: Mapping[str, Mapping[str, Any]], is_whole: bool = False,
        shows_reasoning: bool = True,
    ) -> None:
        self.num_calls = 0
        self._style, self._patterns = style, make_patterns(style)
        self._marks = re.compile("|".join(map(re.escape, self._patterns.marks)))
        self._readers = {name: ArgumentReader(style, schema) for name, schema in tools.items()}
        self._part = Part.HEAD if style.channel else Part.START if is_whole or style.is_whole else Part.CONTENT
        self._heads = self._patterns.heads
        self._text = ""  # text that has not been returned yet
        self._at = 0  # how much of it has been returned, during `feed`
        self._end = ValueEnd()
        self._name = ""  # name of the called tool
        self._key, self._after = "", ""  # name of the argument, and what ends its value
        self._value: list[str] = []  # of an argument that can be read only as a whole
        self._num_arguments = 0
        self._is_literal = False  # the value is one of the style's language
        self._is_reasoning, self._shows_reasoning = False, shows_reasoning
        self._is_after_call = False
        self._pieces: list[Piece] = []
        self._steps: dict[Part, Callable[[], bool]] = {
            Part.START: self._take_start, Part.CONTENT: self._take_content, Part.HEAD: self._take_head,
            Part.ARGUMENTS: self._take_arguments, Part.NEXT_ARGUMENT: self._take_key,
            Part.TEXT_ARGUMENT: self._take_text, Part.WHOLE_ARGUMENT: self._take_whole,
            Part.JSON_ARGUMENT: self._take_value, Part.AFTER_ARGUMENT: self._take_after,
            Part.ID: self._take_id, Part.TAIL: self._take_tail, Part.REST: self._take_rest,
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
            self._part, self._heads = Part.HEAD, self._patterns.heads
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
        matches = (head.match(self._text, self._at) for head in self._heads)
        found = next(filter(None, matches), None)
        is_known = found is None or found["name"] in self._readers
        if found is None or not is_known:
            if is_known and len(self._text) - self._at <= MAX_HEAD_CHARS:
                return False
            # not a call: skip its first character and continue
            self._say(self._text[self._at])
            self._at += 1
            self._part = Part.CONTENT
            return True
        self._name = found["name"]
        self._pieces.append(Piece("function", "", self.num_calls, self._make_id(found), self._name))
        self.num_calls += 1
        self._num_arguments = 0
        self._at = found.end()
        self._end = ValueEnd()
        self._part = Part.ARGUMENTS if self._style.parameter is None else Part.NEXT_ARGUMENT
        return True

    def _make_id(self, head: re.Match[str]) -> str:
        """Return the id of a call: the model's own if it has written one, since its template shows ids."""
        groups = head.groupdict()
        if groups.get("index") is not None and "functions." in head[0]:
            return f"functions.{self._name}:{groups['index']}"
        if groups.get("id") is not None:
            return str(groups["id"])
        # Mistral's templates take ids of nine letters and digits only.
        made = uuid.uuid4().hex
        return made[:9] if "[TOOL_CALLS]" in self._style.openings[0] else f"call_{made[:24]}"

    def _take_arguments(self) -> bool:
        if self._take_json():
            self._part, self._is_after_call = Part.TAIL if self._patterns.tail_id is None else Part.ID, True
        return True

    def _take_id(self) -> bool:
        assert self._patterns.tail_id is not None, "an id follows the arguments"
        found = self._patterns.tail_id.match(self._text, self._at)
        if found is None or found.end() == len(self._text):
            is_over = len(self._text) - self._at > MAX_HEAD_CHARS
            self._part = Part.TAIL if is_over else self._part
            return is_over
        self._at, self._part = found.end(), Part.TAIL
        return True

    def _take_json(self) -> bool:
        end = self._end.find(self._text, self._at)
        self._add(self._text[self._at : end])
        self._at = end
        return self._end.is_ended

    def _take_key(self) -> bool:
        ways = ((way, way.before.match(self._text, self._at)) for way in self._patterns.arguments)
        way, found = next((pair for pair in ways if pair[1] is not None), (None, None))
        if way is not None and found is not None:
            self._key, self._after = found[1], way.after
            kind = self._readers[self._name].find_kind(self._key)
            if way.is_text is not None:
                kind = "text" if way.is_text else "other"
            is_text = kind == "text"
            self._add(f"{', ' if self._num_arguments else '{'}{json.dumps(self._key)}: {chr(34) * is_text}")
            self._num_arguments += 1
            self._at, self._value = found.end(), []
            self._end = ValueEnd()
            if self._style.dialect != "json":
                self._end = ValueEnd((self._style.quote,) if self._style.quote else ("'", '"'))
            self._part = Part.TEXT_ARGUMENT if is_text else Part.WHOLE_ARGUMENT
            if kind == "other" and self._style.dialect == "json":
                self._part = Part.JSON_ARGUMENT
            self._is_literal = kind == "other"
        elif self._text.startswith(self._patterns.after_arguments, self._at):
            self._add("}" if self._num_arguments else "{}")
            self._part, self._is_after_call = Part.TAIL, True
        elif len(self._text) - self._at > MAX_HEAD_CHARS:
            self._part = Part.TAIL
        else:
            return False
        return True

    def _find_end(self) -> tuple[int, bool]:
        """Return how far a text argument goes, and whether it ends there."""
        mark = self._after.rstrip("\n")
        found = self._text.find(mark, self._at)
        end = found if found >= 0 else len(self._text) - overlap(self._text[self._at :][-len(mark) :], mark)
        return end, found >= 0

    def _take_text(self) -> bool:
        end, is_ended = self._find_end()
        self._add(escape(self._text[self._at : end]))
        self._at = end
        if is_ended:
            self._add('"')
            self._part = Part.AFTER_ARGUMENT
        return is_ended

    def _take_whole(self) -> bool:
        if self._is_literal:
            end = self._end.find(self._text, self._at)
            is_ended = self._end.is_ended
        else:
            end, is_ended = self._find_end()
        self._value.append(self._text[self._at : end])
        self._at = end
        if is_ended:
            self._add(self._readers[self._name].read(self._key, "".join(self._value)))
            self._part = Part.AFTER_ARGUMENT
        return is_ended

    def _take_value(self) -> bool:
        scalar = SCALAR.match(self._text, self._at)
        if scalar is None or self._end.is_begun:
            if self._take_json():
                self._part = Part.AFTER_ARGUMENT
            return True
        if scalar.end() == len(self._text):
            return False
        self._add(PYTHON.get(scalar[0], scalar[0]))
        self._at, self._part = scalar.end(), Part.AFTER_ARGUMENT
        return True

    def _take_after(self) -> bool:
        if self._text.startswith(self._after, self._at):
            self._at += len(self._after)
        elif self._after.startswith(self._text[self._at :]):
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
            self._part, self._heads = Part.HEAD, self._patterns.next_heads
        elif self._is_tail_begun():
            return False
        else:
            self._part = Part.CONTENT
        return True

    def _is_tail_begun(self) -> bool:
        rest = self._text[self._at : self._at + MAX_HEAD_CHARS]
        tails = (self._patterns.separator, self._patterns.close)
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
