"""Patterns: the regular expressions that find the parts of a style's calls, and where values end."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from grammar import ToolStyle


class ArgumentPattern(NamedTuple):
    """How an argument is written.

    Attributes:
        before: up to its value; its group is the key.
        after: what ends the value.
        is_text: whether the value is text; None where its schema says so.
    """

    before: re.Pattern[str]
    after: str
    is_text: bool | None


@dataclass(frozen=True, slots=True)
class Patterns:
    """Patterns that find the parts of calls in a text.

    Attributes:
        marks: what begins the first call.
        heads: from there up to the arguments, with the groups name, and id or index.
        next_heads: the same for a call right after another one.
        message: the beginning of a message, where an answer has several; its group is the channel.
        arguments: the ways to write one.
        after_arguments: what ends them.
        tail_id: what follows them up to the id of the call, None where no id does.
        separator: what stands between two calls, None where text may.
        close: what ends the last of them.
    """

    marks: tuple[str, ...]
    heads: tuple[re.Pattern[str], ...]
    next_heads: tuple[re.Pattern[str], ...]
    message: re.Pattern[str]
    arguments: tuple[ArgumentPattern, ...]
    after_arguments: str
    tail_id: re.Pattern[str] | None
    separator: str | None
    close: str


@cache
def make_patterns(style: ToolStyle) -> Patterns:
    """Return the patterns of a style."""
    first = r"(?=\{)" if style.parameter is None else ""
    heads = [_fill(re.escape(head)) + first for head in style.heads]
    channel = re.escape(style.channel).replace(r"\{channel\}", "(analysis|commentary|final)")
    before_id, _, tail = style.tail.rpartition("{id}")
    return Patterns(
        (style.next_message,) if style.channel else style.marks,
        tuple(re.compile(re.escape(opening) + head) for opening in style.openings for head in heads),
        tuple(map(re.compile, heads)), re.compile(channel or "(?!)"), tuple(_list_arguments(style)),
        tail or style.end, re.compile(_fill(re.escape(before_id + "{id}"))) if before_id else None,
        None if style.separator is None else tail + style.separator, tail + style.end,
    )


def _fill(head: str) -> str:
    found = head.replace(r"\{name\}", r"(?P<name>[\w-]+)(?=[^\w-])")
    return found.replace(r"\{index\}", r"(?P<index>\d+)").replace(r"\{id\}", r"(?P<id>[\w-]+)")


def _list_arguments(style: ToolStyle) -> Iterator[ArgumentPattern]:
    separator = f"(?:{re.escape(style.parameter_separator)})?"
    ways = [(style.parameter, None)] if style.other_parameter is None else [
        (style.parameter, True), (style.other_parameter, False),
    ]
    for parameter, is_text in ways:
        before, _, after = (parameter or "{key}{value}").partition("{value}")
        key = re.escape(before).replace(r"\{key\}", r"([\w.$@-]+)")
        yield ArgumentPattern(re.compile(separator + key), after, is_text)


class ValueEnd:
    """Finds the end of a value of JSON, of Python, or of Gemma's notation, in text that arrives in pieces."""

    def __init__(self, quotes: tuple[str, ...] = ('"',)) -> None:
        self.is_begun = self.is_ended = False
        self._quotes = quotes
        self._quote_starts = {quote[0] for quote in quotes}
        self._quote = ""  # of the open string
        self._depth = 0
        self._is_escaped = False

    def find(self, text: str, start: int) -> int:
        """Return up to where the text from `start` is a part of the value, as far as the text shows it."""
        self.is_begun, at = True, start
        while at < len(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._quote:
                if text.startswith(self._quote, at):
                    at, self._quote = at + len(self._quote), ""
                    if self._end_value():
                        return at
                    continue
                if self._quote.startswith(text[at : at + 16]):
                    return at
                self._is_escaped = text[at] == "\\" and len(self._quote) == 1
            elif text[at] in self._quote_starts and (quotes := self._list_quotes(text, at)):
                if text.startswith(quotes[0], at):
                    at, self._quote = at + len(quotes[0]), quotes[0]
                    continue
                return at
            elif text[at] in "[{":
                self._depth += 1
            elif self._depth == 0 and text[at] in ",)]}<\n":
                self.is_ended = True
                return at
            elif text[at] in "]}":
                self._depth -= 1
                if self._end_value():
                    return at + 1
            at += 1
        return at

    def _list_quotes(self, text: str, at: int) -> list[str]:
        """Return the quotes that may begin there, as far as the text shows it."""
        rest = text[at : at + max(map(len, self._quotes))]
        return [quote for quote in self._quotes if quote.startswith(rest) or rest.startswith(quote)]

    def _end_value(self) -> bool:
        self.is_ended = self._depth == 0
        return self.is_ended
