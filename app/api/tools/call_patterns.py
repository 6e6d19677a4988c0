"""Patterns: the regular expressions that find the parts of a style's calls."""

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
