"""Prompts of conversations, and models that reason before they answer: which they are, and where the reasoning ends.

the prompt ends in <think>              the output begins inside the reasoning (DeepSeek R1, QwQ)
the template supports reasoning         the output may begin with it (Qwen 3), unless enable_thinking is false
the prompt ends in </think>, or
the template does not support it        there is no reasoning, and <think> is ordinary text
the prompt ends in <|start|>assistant   the output is messages with channels: analysis, then final (gpt-oss)

The API, the chat and the extraction use this. A grammar begins after the end of the reasoning
(grammar/match/reasoning.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from engine import Engine, InvalidRequest
from grammar import GrammarSpec, Reasoning

Json = dict[str, Any]

OPEN = "<think>"
CLOSE = "</think>"
PROBE = "probe_of_troupe"
# enough of a prompt's end to see whether it opens the reasoning
TAIL_TOKENS = 24
# the names under which chat templates have their switch
SWITCHES = ("enable_thinking", "thinking")
FINAL = "<|channel|>final<|message|>"
ASSISTANT = "<|start|>assistant"
CHANNEL = re.compile(r"(?:<\|start\|>assistant)?<\|channel\|>(\w+)[^<]*(?:<\|constrain\|>\w+)?<\|message\|>")
HEADERS = ("<|start|>", "<|channel|>")  # what a message begins with
MAX_HEADER_CHARS = 200
END_OF_MESSAGE = re.compile(r"<\|(?:end|return|call)\|>")


@dataclass(frozen=True, slots=True)
class Thinking:
    """The way in which the outputs of one request are split into reasoning and content.

    Attributes:
        is_open: the prompt ends inside the reasoning; otherwise the output may begin it.
        keeps_breaks: line breaks after the reasoning belong to the content.
        is_shown: whether the reply includes reasoning.
        has_channels: reasoning and content are messages with channels; see `ChannelSplitter`.
    """

    is_open: bool
    keeps_breaks: bool = False
    is_shown: bool = True
    has_channels: bool = False

    @property
    def end(self) -> str:
        """The mark that ends the reasoning."""
        return FINAL if self.has_channels else CLOSE


def supports_reasoning(render: Callable[..., str]) -> bool:
    """Return whether a chat template supports reasoning.

    Args:
        render: `Tokenizer.apply_chat_template`.
    """
    user, answer = {"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}
    asked = _try(render, [user])
    # a switch that changes the prompt's part about reasoning
    silent = [_try(render, [user], **{name: False}) for name in SWITCHES]
    if any(text != asked and OPEN in text for text in silent) or asked.rstrip().endswith((OPEN, ASSISTANT)):
        return True
    # reasoning is written between the marks, or old reasoning is omitted
    if OPEN in _try(render, [user, answer | {"reasoning_content": PROBE}], add_generation_prompt=False):
        return True
    reasoning = answer | {"content": f"{OPEN}{PROBE}{CLOSE}y"}
    rendered = _try(render, [user, reasoning, user])
    return bool(rendered) and PROBE not in rendered


def find_thinking(
    knows: bool, tail: str, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> Thinking | None:
    """Return how the output of a rendered conversation begins; None if it contains no reasoning.

    Args:
        knows: whether the template supports reasoning.
        tail: the end of the rendered prompt.
        options: the template's options, such as `add_generation_prompt`.
    """
    if options.get("continue_final_message"):
        _, mark, reasoning = str(messages[-1]["content"]).rpartition(OPEN)
        return Thinking(True) if knows and mark and CLOSE not in reasoning else None
    tail = tail.rstrip()
    if not options.get("add_generation_prompt") or tail.endswith(CLOSE):
        return None
    if tail.endswith(OPEN):
        return Thinking(True)
    if tail.endswith(ASSISTANT):
        return Thinking(False, has_channels=True)
    is_off = any(options.get(name) is False for name in SWITCHES)
    return Thinking(False) if knows and not is_off else None


async def prepare_prompt(
    engine: Engine, knows: bool, messages: Sequence[Mapping[str, Any]], **options: Any
) -> tuple[list[int], Thinking | None]:
    """Return the token ids of a conversation under the chat template, and how the output begins.

    Args:
        knows: whether the template supports reasoning.
        options: the template's; by default a new answer begins.

    Raises InvalidRequest: the conversation does not fit the template or the model.
    """
    options = {"add_generation_prompt": True} | options
    ids = await engine.render_chat(messages, **options)
    tokenizer = engine.tokenizer
    assert tokenizer is not None, "the prompt was rendered"
    tail = tokenizer.decode(ids[-TAIL_TOKENS:], skip_special_tokens=False)
    return ids, find_thinking(knows, tail, messages, options)


def write_output(reasoning: str, content: str, thinking: Thinking | None) -> str:
    """Return an output that is split into this reasoning and content; without content it ends inside the reasoning."""
    begun = end = ""
    if thinking is not None and thinking.has_channels:
        begun = f"<|channel|>analysis<|message|>{reasoning}" if reasoning else ""
        end = f"<|end|>{ASSISTANT}{FINAL}" if reasoning else FINAL
    elif thinking is not None and thinking.is_open:
        begun, end = reasoning, f"\n{CLOSE}\n\n"
    elif reasoning:
        begun, end = f"{OPEN}\n{reasoning}", f"\n{CLOSE}\n\n"
    return begun + end + content if content else begun


def gate_grammar(spec: GrammarSpec, thinking: Thinking, allows_breaks: bool = False) -> GrammarSpec:
    """Return the grammar of an answer that follows the reasoning."""
    begin = None if thinking.is_open or thinking.has_channels else OPEN
    return replace(spec, reasoning=Reasoning(begin, thinking.end, allows_breaks))


def _try(render: Callable[..., str], messages: Sequence[Json], **options: Any) -> str:
    try:
        return render(messages, **options)
    except InvalidRequest:
        return ""


class Part(Enum):
    """The part of the output that is being read."""

    START = 0  # not known yet
    REASONING = 1
    BREAK = 2  # line breaks after the reasoning
    CONTENT = 3


class ReasoningSplitter:
    """Splits one output. Line breaks around the reasoning are dropped, unless the content keeps them.

    Attributes:
        has_reasoning: whether the output contains reasoning, complete or not.
        is_closed: whether the reasoning has ended.
    """

    def __init__(self, thinking: Thinking) -> None:
        self.is_closed = False
        self._thinking = thinking
        self._part = Part.START
        self._held = ""
        self._is_begun = False  # a part of the reasoning was returned
        self._num_breaks = 0  # line breaks of the reasoning before `_held`, which may turn out to be its last ones

    @property
    def has_reasoning(self) -> bool:
        return self.is_closed or self._part is Part.REASONING or self._is_waiting_for_reasoning

    @property
    def _is_waiting_for_reasoning(self) -> bool:
        return self._part is Part.START and self._thinking.is_open

    def feed(self, text: str) -> tuple[str, str]:
        """Return further reasoning and further content."""
        self._held += text
        if self._part is Part.START:
            self._start()
        reasoning = self._take_reasoning() if self._part is Part.REASONING else ""
        if self._part is Part.BREAK:
            self._held = self._held if self._thinking.keeps_breaks else self._held.lstrip("\n")
            self._part = Part.CONTENT if self._held else Part.BREAK
        content = ""
        if self._part is Part.CONTENT:
            content, self._held = self._held, ""
        return reasoning, content

    def close(self) -> tuple[str, str]:
        """Return the withheld text."""
        held, self._held = self._held, ""
        if self._part is Part.REASONING or self._is_waiting_for_reasoning:
            return self._trim(self._hold_breaks(held)), ""
        return "", held if self._part is Part.START else ""

    def _start(self) -> None:
        begun = self._held.lstrip()
        if begun.startswith(OPEN):
            # even if the prompt has opened it: some models write the mark again
            self._part, self._held = Part.REASONING, begun.removeprefix(OPEN)
        elif not OPEN.startswith(begun):
            self._part = Part.REASONING if self._thinking.is_open else Part.CONTENT

    def _take_reasoning(self) -> str:
        found = self._held.find(CLOSE)
        if found >= 0:
            reasoning = self._trim(self._hold_breaks(self._held[:found]))
            self._held = self._held[found + len(CLOSE) :]
            self._part, self.is_closed = Part.BREAK, True
            return reasoning
        at = len(self._held) - overlap(self._held[-len(CLOSE) :], CLOSE)
        certain, self._held = self._held[:at], self._held[at:]
        return self._trim(self._hold_breaks(certain))

    def _hold_breaks(self, text: str) -> str:
        """Return the text with the line breaks held before it, and without its last ones, which are held now."""
        certain = text.rstrip("\n")
        if not certain:
            self._num_breaks += len(text)
            return ""
        breaks, self._num_breaks = "\n" * self._num_breaks, len(text) - len(certain)
        return breaks + certain

    def _trim(self, reasoning: str) -> str:
        if not self._is_begun:
            reasoning = reasoning.lstrip("\n")
            self._is_begun = bool(reasoning)
        return reasoning


class ChannelSplitter:
    """Splits one output of messages with channels: `analysis` is reasoning, all others are content.

    Attributes:
        has_reasoning: whether the output contains reasoning, complete or not.
        is_closed: whether the reasoning has ended.
    """

    def __init__(self) -> None:
        self.has_reasoning = self.is_closed = False
        self._held = ""
        self._is_header = True  # the beginning of a message is being read
        self._is_reasoning = False

    def feed(self, text: str) -> tuple[str, str]:
        """Return further reasoning and further content."""
        self._held += text
        found: tuple[list[str], list[str]] = ([], [])
        while self._held:
            if self._is_header and not self._take_header(found):
                break
            end = END_OF_MESSAGE.search(self._held)
            if end is None:
                num_held = max(overlap(self._held, mark) for mark in ("<|end|>", "<|return|>", "<|call|>"))
                at = len(self._held) - num_held
                found[not self._is_reasoning].append(self._held[:at])
                self._held = self._held[at:]
                break
            found[not self._is_reasoning].append(self._held[: end.start()])
            self._held, self._is_header = self._held[end.end() :], True
        return "".join(found[0]), "".join(found[1])

    def close(self) -> tuple[str, str]:
        """Return the withheld text; the beginning of a message is not content."""
        held, self._held = self._held, ""
        if self._is_header and held.startswith(HEADERS):
            return "", ""
        return (held, "") if self._is_reasoning else ("", held)

    def _take_header(self, found: tuple[list[str], list[str]]) -> bool:
        """Read the beginning of a message, unless more text is needed."""
        header = CHANNEL.match(self._held)
        is_begun = self._held.startswith(HEADERS) or any(mark.startswith(self._held) for mark in HEADERS)
        if header is None and is_begun and len(self._held) < MAX_HEADER_CHARS:
            return False
        self._is_header = False
        self._is_reasoning = header is not None and header[1] == "analysis"
        if header is not None:
            self._held = self._held[header.end() :]
        if self._is_reasoning and self.has_reasoning:
            found[0].append("\n\n")
        self.has_reasoning |= self._is_reasoning
        self.is_closed = self.has_reasoning and not self._is_reasoning
        return True


def make_splitter(thinking: Thinking) -> ReasoningSplitter | ChannelSplitter:
    """Return the splitter of one output."""
    return ChannelSplitter() if thinking.has_channels else ReasoningSplitter(thinking)


def overlap(text: str, mark: str) -> int:
    """Return the length of the longest suffix of the text that is a proper prefix of the mark."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
