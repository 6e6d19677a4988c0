"""The interface of grammar engines, and what all matchers share: the end of the text, and rollback.

GrammarSpec --compile--> Program --new_matcher--> Matcher --Filler.fill--> bitmask rows
"""

import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from .bitmask import check_bitmask
from .plan import PlanEntry
from .vocabulary import Vocabulary

# Longest forced text that is searched for.
MAX_FORCED_BYTES = 512
# Memory of the lexer states that can be made in a second: no engine reports its own.
BYTES_PER_S = 192 * 1024 * 1024
# A program that has grown so much is replaced.
MAX_GROWTH_BYTES = 256 * 1024 * 1024


@dataclass(slots=True, eq=False)
class Usage:
    """What the matchers of one program share. One thread at a time uses the matchers of a program.

    Attributes:
        grown_bytes: memory that masks have added to the program, estimated by their processor time.
        longest_s: processor time of the longest mask since this was last set to 0.
        num_apart: so many masks more are filled apart from those of other programs, since they may be slow.
    """

    grown_bytes: int = 0
    longest_s: float = 0.0
    num_apart: int = 0

    def note_mask(self, time_s: float) -> None:
        """Count a mask by its processor time."""
        self.grown_bytes += int(time_s * BYTES_PER_S)
        self.longest_s = max(self.longest_s, time_s)


class Filler:
    """Fills the rows of many matchers of one kind; here, one row after the other.

    A subclass makes one native call for all of them.
    """

    # Any: a filler takes the matchers of its own kind, which its callers have grouped.
    def fill(self, matchers: Sequence[Any], rows: Sequence[int], bitmask: np.ndarray) -> None:
        """Write matcher i's mask into row rows[i]; none of the matchers is terminated."""
        pairs = [(matcher, row) for matcher, row in zip(matchers, rows, strict=True) if matcher.reads_inner]
        fill_bitmask([matcher.inner for matcher, _ in pairs], [row for _, row in pairs], bitmask)
        start = time.thread_time()
        for matcher, row in zip(matchers, rows, strict=True):
            check_bitmask(bitmask, matcher.vocabulary.num_words, [row])
            matcher.write_row(bitmask[row])
            end = time.thread_time()
            matcher.usage.note_mask(end - start)
            start = end

    def fill_drafts(
        self,
        matchers: Sequence[Any],
        drafts: Sequence[Sequence[int]],
        rows: Sequence[int],
        bitmask: np.ndarray,
    ) -> list[int]:
        """Write matcher i's mask after its first p tokens into row rows[i] + p; return how many are allowed."""
        num_accepted = [0] * len(matchers)
        live, position = list(range(len(matchers))), 0
        try:
            while live:
                fill_bitmask([matchers[i] for i in live], [rows[i] + position for i in live], bitmask)
                for i in live:
                    has_next = position < len(drafts[i]) and not matchers[i].is_terminated()
                    if has_next and matchers[i].accept_token(drafts[i][position]):
                        num_accepted[i] = position + 1
                position += 1
                live = [i for i in live if num_accepted[i] == position]
        finally:  # Roll back even if a matcher fails.
            for matcher, number in zip(matchers, num_accepted, strict=True):
                if number:
                    matcher.rollback(number)
        return num_accepted


class Matcher(ABC):
    """Grammar state of one request, used by one thread at a time. The end token is kept here and reaches no engine.

    Attributes:
        filler: the batch fill, shared by all matchers of one kind; by default one row after the other.
        inner: the matcher around which this one stands, None for an engine's.
        num_text_tokens: accepted tokens, EOS not counted.
        has_ended: EOS was accepted.
        error: why the engine gave up (a resource limit), or None. From then on the mask is all zeros.
        usage: shared by the matchers of one program.
    """

    filler: Filler = Filler()
    inner: "Matcher | None" = None
    error: str | None = None

    def __init__(self, vocabulary: Vocabulary, usage: Usage | None = None) -> None:
        self.vocabulary = vocabulary
        self.usage = Usage() if usage is None else usage
        self.num_text_tokens = 0
        self.has_ended = False

    @abstractmethod
    def _take(self, token_id: int) -> bool:
        """Advance by one token of text; False, with nothing changed, when it is not allowed here."""

    @abstractmethod
    def _take_back(self, num_tokens: int) -> None:
        """Undo the last tokens of text, at least one."""

    @abstractmethod
    def is_completed(self) -> bool:
        """Return whether the text so far is a complete sentence, so that EOS is allowed."""

    @property
    def reads_inner(self) -> bool:
        """Whether `write_row` edits the row of the inner matcher."""
        return self.inner is not None

    def write_row(self, words: np.ndarray) -> None:
        """Write the allowed tokens of a text that has not ended into a row, int32 [words]."""
        raise NotImplementedError("engines with a filler of their own have no such method")

    def accept_token(self, token_id: int) -> bool:
        """Advance by one token; False, with nothing changed, when it is not allowed here."""
        if self.has_ended or not 0 <= token_id < self.vocabulary.size:
            return False
        if token_id in self.vocabulary.eos_token_ids:
            self.has_ended = self.error is None and self.is_completed()
            return self.has_ended
        is_taken = self._take(token_id)
        self.num_text_tokens += is_taken
        return is_taken

    def accept_allowed(self, token_id: int) -> bool:
        """Advance by a token that the last mask allows; where the engine can, other threads run Python meanwhile."""
        return self.accept_token(token_id)

    def fill_next_token_bitmask(self, bitmask: np.ndarray, row: int = 0) -> None:
        """Write the allowed tokens into one row of an int32 [rows, ceil(V/32)] bitmask."""
        if self.has_ended:
            check_bitmask(bitmask, self.vocabulary.num_words, [row])
            bitmask[row] = self.vocabulary.eos_mask
        else:
            self.filler.fill([self], [row], bitmask)

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` accepted tokens, EOS included."""
        num_text = num_tokens - (self.has_ended and num_tokens > 0)
        if not 0 <= num_text <= self.num_text_tokens:
            num_accepted = self.num_text_tokens + self.has_ended
            raise ValueError(f"cannot roll back {num_tokens} tokens of {num_accepted}")
        if num_text:
            self._take_back(num_text)
            self.num_text_tokens -= num_text
        self.has_ended = self.has_ended and num_tokens == 0

    @property
    def is_renewable(self) -> bool:
        """Whether `renew` may help where the matcher met a limit."""
        return self.inner is not None and self.inner.is_renewable

    def renew(self) -> bool:
        """Go on with a new lexer or higher limits after a limit was met, at the same place; False if nothing helps.

        It takes some milliseconds: the grammar is compiled again, and the accepted tokens are taken again.
        """
        return self.inner is not None and self.inner.renew()

    def is_terminated(self) -> bool:
        """Return whether EOS was accepted."""
        return self.has_ended

    def forced_text(self) -> bytes:
        """Return the bytes that any continuation begins with, b"" where there is a choice; nothing changes."""
        return b"" if self.has_ended or self.error is not None else self._find_forced()

    def _find_forced(self) -> bytes:
        return b"" if self.inner is None else self.inner.forced_text()


def fill_bitmask(matchers: Sequence[Matcher], rows: Sequence[int], bitmask: np.ndarray) -> None:
    """Write the mask of each matcher into its row; matchers of different backends may mix.

    One call per backend, made without the GIL where the engine can. A matcher must not stand twice in it.
    """
    if len(matchers) != len(rows):
        raise ValueError(f"{len(matchers)} matchers need as many rows, got {len(rows)}")
    groups: defaultdict[Filler, tuple[list[Matcher], list[int]]] = defaultdict(lambda: ([], []))
    for matcher, row in zip(matchers, rows, strict=True):
        if matcher.has_ended:
            matcher.fill_next_token_bitmask(bitmask, row)
            continue
        group = groups[matcher.filler]
        group[0].append(matcher)
        group[1].append(row)
    for filler, group in groups.items():
        filler.fill(*group, bitmask)


def fill_draft_bitmask(
    matchers: Sequence[Matcher], drafts: Sequence[Sequence[int]], rows: Sequence[int], bitmask: np.ndarray
) -> list[int]:
    """Write the masks of drafted tokens, for their verification: in one call where the engine can.

    Matcher i's mask after its first p draft tokens goes to row rows[i] + p. A draft ends before the first token
    that is not allowed, and after an EOS. The matchers stay as they are.

    Args:
        drafts: one list of token ids for each matcher; an empty one asks for a single mask.
        rows: for each matcher the first of len(draft) + 1 rows.

    Returns:
        For each matcher, how many draft tokens its grammar allows; so many rows and one more are written.
    """
    if not len(matchers) == len(drafts) == len(rows):
        counts = f"{len(matchers)} matchers, {len(drafts)} drafts and {len(rows)} rows"
        raise ValueError(f"{counts} do not belong together")
    num_accepted = [0] * len(matchers)
    if not any(drafts):
        fill_bitmask(matchers, rows, bitmask)
        return num_accepted
    groups: defaultdict[Filler, list[int]] = defaultdict(list)
    for index, matcher in enumerate(matchers):
        groups[matcher.filler].append(index)
    for filler, members in groups.items():
        own = [matchers[i] for i in members], [drafts[i] for i in members], [rows[i] for i in members]
        for i, count in zip(members, filler.fill_drafts(*own, bitmask), strict=True):
            num_accepted[i] = count
    return num_accepted


@dataclass(frozen=True, slots=True)
class Program:
    """A compiled grammar of one backend.

    Attributes:
        new_matcher: returns a matcher at the start of the grammar.
        size_bytes: memory it holds, estimated when the engine does not say.
        grammar: its text in llguidance's format, "" where another engine compiled it.
        checks: the residual checks (match/checks.py), None for a grammar that needs none.
        usage: of its matchers.
        is_bounded: no check may want a longer number than `NumberBound` lets through.
    """

    new_matcher: Callable[[], Matcher]
    size_bytes: int
    grammar: str = ""
    checks: Any = None
    usage: Usage = field(default_factory=Usage)
    is_bounded: bool = True


@dataclass(frozen=True)
class CompiledGrammar:
    """A grammar ready for use: who enforces what, and a source of matchers."""

    backend: str
    find_plan: Callable[[], tuple[PlanEntry, ...]]
    program: Program

    @cached_property
    def plan(self) -> tuple[PlanEntry, ...]:
        """The enforcer of each keyword. A large schema takes milliseconds, so it is worked out once."""
        return self.find_plan()

    def matcher(self) -> Matcher:
        """Return a matcher at the start of the grammar."""
        return self.program.new_matcher()
