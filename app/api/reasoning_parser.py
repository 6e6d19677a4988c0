"""Reads outputs with reasoning: it is separated from the content and the tool calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from app.api.constraint import Constraint
from app.api.tools.calls import ToolParser, make_parser
from app.api.tools.custom_calls import CustomCalls
from app.api.tools.functions import FunctionCalls
from app.api.tools.use import ToolUse
from app.reasoning import Thinking, gate_grammar, make_splitter

Json = dict[str, Any]


class ReasoningParser:
    """A ToolParser of outputs with reasoning; the content is passed to the parser of the tools, if there are any."""

    def __init__(self, thinking: Thinking, inner: ToolParser | None) -> None:
        self._is_shown = thinking.is_shown
        self._splitter = make_splitter(thinking)
        self._inner = inner

    @property
    def num_calls(self) -> int:
        return 0 if self._inner is None else self._inner.num_calls

    def feed(self, text: str) -> Json:
        return self._make_delta(*self._splitter.feed(text))

    def close(self, is_cut: bool = False) -> Json:
        delta = self._make_delta(*self._splitter.close())
        last = {} if self._inner is None else self._inner.close(is_cut)
        if "content" in delta and "content" in last:
            last["content"] = delta["content"] + last["content"]
        return delta | last

    def _make_delta(self, thought: str, words: str) -> Json:
        delta: Json = {}
        if thought and self._is_shown:
            # newer clients read the second name
            delta |= {"reasoning_content": thought, "reasoning": thought}
        if words:
            delta |= {"content": words} if self._inner is None else self._inner.feed(words)
        return delta


def make_reader(tools: ToolUse | None, thinking: Thinking | None) -> ToolParser | None:
    """Return the parser of one output of a request; None if all of it is content."""
    inner = None if tools is None else make_parser(tools)
    if inner is not None and tools is not None and tools.customs:
        inner = CustomCalls(inner, tools.customs)
    if inner is not None and tools is not None and tools.calls_field == "function_call":
        inner = FunctionCalls(inner)
    return inner if thinking is None else ReasoningParser(thinking, inner)


def think_first(constraint: Constraint, thinking: Thinking) -> tuple[Constraint, Thinking]:
    """Return the constraint of an answer after its reasoning."""
    spec = constraint.spec
    # These texts never begin with a line break, so one belongs to the reasoning.
    allows_breaks = spec.kind in ("json_schema", "json_object", "xml") or constraint.param == "tools"
    gated = Constraint(constraint.param, gate_grammar(spec, thinking, allows_breaks))
    return gated, replace(thinking, keeps_breaks=not allows_breaks)
