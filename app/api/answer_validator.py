"""Validates finished choices independently of the grammar, and counts their reasoning tokens.

The grammar has already enforced the format; the reply reports this second check.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from app.reasoning import Thinking, split_reasoning
from engine import CompletionOutput
from grammar import GrammarError, GrammarSpec, OutputCheck

# above this many characters of text and schema, validate in a thread
MAX_CHARS_ON_LOOP = 16_384
Decode = Callable[[Sequence[int]], str]
Check = Callable[[str], bool | None]


@dataclass(frozen=True, slots=True)
class Validation:
    """Result of validating a choice.

    Attributes:
        is_valid: whether it satisfies its constraint; None if no independent validator exists.
        num_reasoning_tokens: number of its tokens that belong to the reasoning.
    """

    is_valid: bool | None
    num_reasoning_tokens: int


class AnswerValidator:
    """Collects the choices of one request and validates each at its end.

    Args:
        spec: the constraint of the content; None without one.
        check: validates a text instead of the spec, e.g. forced tool calls.
        decode: token ids to text, special tokens included.
    """

    def __init__(
        self, spec: GrammarSpec | None, thinking: Thinking | None, decode: Decode, check: Check | None = None
    ) -> None:
        self._spec = spec
        self._check = check or (None if spec is None else partial(check_output, spec))
        self._thinking = thinking
        self._decode = decode
        self._texts: dict[int, list[str]] = {}
        self._token_ids: dict[int, list[int]] = {}
        self._results: dict[int, Validation] = {}

    async def take(self, index: int, choice: CompletionOutput) -> None:
        """Add an output of a choice: a delta or the whole text."""
        self._texts.setdefault(index, []).append(choice.text)
        if self._thinking is not None:
            self._token_ids.setdefault(index, []).extend(choice.token_ids)
        if not choice.is_finished:
            return
        text, ids = "".join(self._texts.pop(index)), self._token_ids.pop(index, [])
        num_chars = len(text) + (0 if self._spec is None else len(self._spec.text))
        if num_chars > MAX_CHARS_ON_LOOP:
            self._results[index] = await asyncio.to_thread(self._validate, text, ids, choice.finish_reason)
        else:
            self._results[index] = self._validate(text, ids, choice.finish_reason)

    def is_valid(self, indices: Iterable[int]) -> bool | None:
        """Return one result for several choices: false if any is false, true if all are true."""
        found = [self._results[index].is_valid if index in self._results else None for index in indices]
        return False if False in found else None if None in found else True

    def num_reasoning_tokens(self) -> int:
        """Return the number of reasoning tokens in all finished choices."""
        return sum(result.num_reasoning_tokens for result in self._results.values())

    def _validate(self, text: str, token_ids: list[int], finish_reason: str | None) -> Validation:
        words, num_reasoning = text, 0
        if self._thinking is not None:
            splitter, words = split_reasoning(self._thinking, text)
            if splitter.has_reasoning:
                num_reasoning = (
                    self._count(token_ids, self._thinking.end) if splitter.is_closed else len(token_ids)
                )
        is_valid = None if self._check is None else self._check(words)
        if is_valid and finish_reason != "stop":
            is_valid = False  # a truncated text is never valid
        return Validation(is_valid, num_reasoning)

    def _count(self, token_ids: list[int], mark: str) -> int:
        """Return the number of tokens up to the end of the reasoning."""
        ends = range(len(token_ids) + 1)
        return bisect_left(ends, True, key=lambda end: mark in self._decode(token_ids[:end]))


def check_output(spec: GrammarSpec, text: str) -> bool | None:
    """Return whether a text satisfies a spec; None if only the grammar itself could decide."""
    try:
        return OutputCheck(spec).is_valid(text)
    except GrammarError:
        return None  # a schema that the engines accept and the validator does not
