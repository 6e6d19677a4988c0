"""The reasoning gate: a grammar of any kind that begins after the end of the model's reasoning.

    START ──▶ MARK ──▶ REASONING ──▶ BREAK ──▶ VALUE
      └────────┴───────────────────────────────▶┘      where the model may answer at once

Reasoning is any text up to the closing mark. Only line breaks may share a token with the mark.
"""

from enum import IntEnum
from typing import NamedTuple

import numpy as np

from ..backend import Matcher, OuterMatcher
from ..bitmask import clear_bits
from ..spec import Reasoning
from ..vocabulary import Vocabulary, make_mask

MAX_NUM_BREAKS = 2
WRONG = -1


class Phase(IntEnum):
    """The part of the output that the next token belongs to."""

    START = 0  # nothing was written
    MARK = 1  # the beginning of the opening mark
    REASONING = 2
    BREAK = 3
    VALUE = 4


class State(NamedTuple):
    """A matcher's position in the output.

    Attributes:
        tail: what may be the beginning of a mark.
        num_breaks: line feeds after the reasoning.
        tokens: what the grammar has taken; in a mark those that could also begin a value.
    """

    phase: Phase
    tail: bytes = b""
    num_breaks: int = 0
    tokens: tuple[int, ...] = ()


class ReasoningTables:
    """The tokens of one vocabulary that matter to one gate."""

    def __init__(self, vocabulary: Vocabulary, gate: Reasoning) -> None:
        self.vocabulary = vocabulary
        self.start, self.end = (gate.start or "").encode(), gate.end.encode()
        self.start_id, self.end_id = (vocabulary.special_tokens.get(name or "") for name in (gate.start, gate.end))
        self.breaks = (b"", b"\n", b"\n\n") if gate.allows_breaks else (b"",)
        texts = [(index, data) for index, data in enumerate(vocabulary.token_bytes) if data]
        # For each length of a beginning of the end mark, the tokens that complete it and go on wrongly.
        self.wrong: dict[int, list[int]] = {}
        for length in range(1, len(self.end)):
            rest = self.end[length:]
            found = [(index, data[len(rest) :]) for index, data in texts if data.startswith(rest)]
            self.wrong[length] = [index for index, after in found if after not in self.breaks]
        # Row, int32 [words]: reasoning with nothing of the mark before it.
        fine = [index for index, data in texts if self.find_end(data) != WRONG]
        self.reasoning = make_mask([*fine, *([] if self.end_id is None else [self.end_id])], vocabulary.size)
        # Tokens that are parts of the opening mark, and line feeds after the reasoning.
        self._parts = [(index, data) for index, data in texts if data in self.start]
        self._feeds = [(index, data) for index, data in texts if data in self.breaks]
        self.size_bytes = 16 * vocabulary.num_words

    def find_end(self, text: bytes) -> int | None:
        """Return how many line feeds follow the end mark in a text, WRONG for anything else, None without a mark."""
        at = text.find(self.end)
        rest = text[at + len(self.end) :]
        return None if at < 0 else len(rest) if rest in self.breaks else WRONG

    def list_marks(self, written: bytes) -> list[int]:
        """Return the tokens that go on the opening mark; those that complete it hold no more."""
        rest = self.start[len(written) :]
        found = [index for index, data in self._parts if rest.startswith(data)]
        return found if written or self.start_id is None else [*found, self.start_id]

    def list_breaks(self, num_breaks: int) -> list[int]:
        """Return the line-feed tokens that may follow `num_breaks` line feeds after the reasoning."""
        return [index for index, data in self._feeds if num_breaks + len(data) <= MAX_NUM_BREAKS]


class GatedMatcher(OuterMatcher):
    """Grammar state of one request that reasons first."""

    def __init__(self, inner: Matcher, tables: ReasoningTables) -> None:
        super().__init__(inner)
        self._tables = tables
        self.state = State(Phase.START if tables.start else Phase.REASONING)
        # Before each token up to the first one of the value, behind which so many follow.
        self._history: list[State] = []
        self._num_more = 0

    def _take(self, token_id: int) -> bool:
        if self.state.phase is Phase.VALUE:
            is_taken = self.inner.accept_token(token_id)
            self._num_more += is_taken
            return is_taken
        after = self._step(token_id)
        if after is None or after.phase is Phase.MARK:
            after = self._add_value(token_id, after)
        if after is None:
            return False
        if not after.tokens:
            self.inner.rollback(len(self.state.tokens))
        self._history.append(self.state)
        self.state = after
        return True

    def _add_value(self, token_id: int, after: State | None) -> State | None:
        """Return the state after a token that the value may have, where `after` is the state without it."""
        if not self.may_begin_value or not self.inner.accept_token(token_id):
            return after
        tokens = (*self.state.tokens, token_id)
        return State(Phase.VALUE, tokens=tokens) if after is None else after._replace(tokens=tokens)

    @property
    def may_begin_value(self) -> bool:
        """Whether the next token may be one of the value."""
        return self.state.phase is not Phase.REASONING and (
            self.state.phase is not Phase.MARK or bool(self.state.tokens)
        )

    def _step(self, token_id: int) -> State | None:
        """Return the state after a token that does not belong to the value; None if it is not allowed."""
        tables, (phase, tail, num_breaks, _) = self._tables, self.state
        data = tables.vocabulary.token_bytes[token_id]
        match phase:
            case Phase.REASONING:
                found = 0 if token_id == tables.end_id else tables.find_end(tail + data) if data else WRONG
                if found is None:
                    return State(Phase.REASONING, (tail + data)[1 - len(tables.end) :] if tables.end[1:] else b"")
                return None if found == WRONG else State(Phase.BREAK, b"", found)
            case Phase.BREAK:
                is_break = data in tables.breaks[1:] and num_breaks + len(data) <= MAX_NUM_BREAKS
                return State(Phase.BREAK, b"", num_breaks + len(data)) if is_break else None
        if token_id == tables.start_id and phase is Phase.START:
            return State(Phase.REASONING)
        written = tail + data
        if not data or not tables.start.startswith(written):
            return None
        return State(Phase.REASONING) if written == tables.start else State(Phase.MARK, written)

    @property
    def reads_inner(self) -> bool:  # type: ignore[override]
        """Whether a value may begin or has begun, at a place other than the middle of a mark."""
        return self.state.phase in (Phase.START, Phase.BREAK, Phase.VALUE)

    def write_row(self, words: np.ndarray) -> None:
        tables, (phase, tail, num_breaks, _) = self._tables, self.state
        match phase:
            case Phase.START | Phase.MARK:
                found = make_mask(tables.list_marks(tail), tables.vocabulary.size)
                words[:] = words | found if self.may_begin_value else found
            case Phase.REASONING:
                words[:] = tables.reasoning
                for length, wrong in tables.wrong.items():
                    if tail.endswith(tables.end[:length]):
                        clear_bits(words, wrong)
            case Phase.BREAK:
                words |= make_mask(tables.list_breaks(num_breaks), tables.vocabulary.size)

    def _take_back(self, num_tokens: int) -> None:
        num_more = min(num_tokens, self._num_more)
        self.inner.rollback(num_more)
        self._num_more -= num_more
        if num_tokens > num_more:
            before = self._history[num_more - num_tokens]
            del self._history[num_more - num_tokens :]
            self.inner.rollback(len(self.state.tokens))
            for token_id in before.tokens:
                self.inner.accept_token(token_id)
            self.state = before

    def is_completed(self) -> bool:
        return self.may_begin_value and self.inner.is_completed()

    def _find_forced(self) -> bytes:
        return self.inner.forced_text() if self.state.phase is Phase.VALUE else b""
