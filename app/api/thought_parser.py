"""Splits streamed text into reasoning and content."""

from __future__ import annotations

from enum import Enum
from typing import Any

from app.api.marks import overlap
from app.api.thinking import CLOSE, OPEN, Thinking
from app.api.tools.calls import ToolParser, make_parser
from app.api.tools.use import ToolUse

Json = dict[str, Any]


class Part(Enum):
    """The part of the output that the text is in."""

    START = 0  # not known yet
    THOUGHT = 1
    BREAK = 2  # line breaks after the reasoning
    WORDS = 3


class ThoughtSplitter:
    """Splits one output. Line breaks around a thought belong to neither, unless the words keep theirs.

    Attributes:
        has_thought: whether the output has a thought, complete or not.
        is_closed: whether the thought has ended.
    """

    def __init__(self, thinking: Thinking) -> None:
        self.is_closed = False
        self._thinking = thinking
        self._part = Part.START
        self._held = ""
        self._is_begun = False  # a part of the reasoning was returned

    @property
    def has_thought(self) -> bool:
        return self.is_closed or self._part is Part.THOUGHT or self._is_waiting_for_thought

    @property
    def _is_waiting_for_thought(self) -> bool:
        return self._part is Part.START and self._thinking.is_open

    def feed(self, text: str) -> tuple[str, str]:
        """More of the thought, and more of the words."""
        self._held += text
        if self._part is Part.START:
            self._start()
        thought = self._take_thought() if self._part is Part.THOUGHT else ""
        if self._part is Part.BREAK:
            self._held = self._held if self._thinking.keeps_breaks else self._held.lstrip("\n")
            self._part = Part.WORDS if self._held else Part.BREAK
        words = ""
        if self._part is Part.WORDS:
            words, self._held = self._held, ""
        return thought, words

    def close(self) -> tuple[str, str]:
        """What was held back."""
        held, self._held = self._held, ""
        if self._part is Part.THOUGHT or self._is_waiting_for_thought:
            return self._trim(held).rstrip("\n"), ""
        return "", held if self._part is Part.START else ""

    def _start(self) -> None:
        begun = self._held.lstrip()
        if begun.startswith(OPEN):
            # also where the prompt has opened it: some models do it once more
            self._part, self._held = Part.THOUGHT, begun.removeprefix(OPEN)
        elif not OPEN.startswith(begun):
            self._part = Part.THOUGHT if self._thinking.is_open else Part.WORDS

    def _take_thought(self) -> str:
        found = self._held.find(CLOSE)
        if found >= 0:
            thought, self._held = (
                self._trim(self._held[:found]).rstrip("\n"),
                self._held[found + len(CLOSE) :],
            )
            self._part, self.is_closed = Part.BREAK, True
            return thought
        certain = self._held[: len(self._held) - overlap(self._held[-len(CLOSE) :], CLOSE)].rstrip("\n")
        self._held = self._held[len(certain) :]
        return self._trim(certain)

    def _trim(self, thought: str) -> str:
        if not self._is_begun:
            thought = thought.lstrip("\n")
            self._is_begun = bool(thought)
        return thought


class ThoughtParser:
    """A ToolParser of outputs with thoughts; the words go through the parser of the tools, if there are any."""

    def __init__(self, thinking: Thinking, inner: ToolParser | None) -> None:
        self._is_shown = thinking.is_shown
        self._splitter = ThoughtSplitter(thinking)
        self._inner = inner

    @property
    def num_calls(self) -> int:
        return 0 if self._inner is None else self._inner.num_calls

    def feed(self, text: str) -> Json:
        return self._tell(*self._splitter.feed(text))

    def close(self) -> Json:
        delta = self._tell(*self._splitter.close())
        last = {} if self._inner is None else self._inner.close()
        if "content" in delta and "content" in last:
            last["content"] = delta["content"] + last["content"]
        return delta | last

    def _tell(self, thought: str, words: str) -> Json:
        delta: Json = {}
        if thought and self._is_shown:
            # the second name is the one that newer clients look for
            delta |= {"reasoning_content": thought, "reasoning": thought}
        if words:
            delta |= {"content": words} if self._inner is None else self._inner.feed(words)
        return delta


def make_reader(tools: ToolUse | None, thinking: Thinking | None) -> ToolParser | None:
    """What reads one output of a request; None when all of it is words."""
    inner = None if tools is None else make_parser(tools)
    return inner if thinking is None else ThoughtParser(thinking, inner)


def read_thought(thinking: Thinking, text: str) -> tuple[ThoughtSplitter, str]:
    """A whole output: where it stood at its end, and its words."""
    splitter = ThoughtSplitter(thinking)
    _, words = splitter.feed(text)
    return splitter, words + splitter.close()[1]
