"""The interface of grammar engines, and what all matchers share: the end of the text, and rollback.

GrammarSpec --compile--> Program --new_matcher--> Matcher --fill_bitmask--> bitmask rows
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from .bitmask import check_bitmask
from .plan import PlanEntry
from .vocabulary import Vocabulary, make_mask

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


# Masks that took less time by the wall clock count with that: reading a thread's processor time may take 30 us.
SHORT_S = 0.0005


class MaskClock:
    """Measures the processor time of one mask after the other."""

    def __init__(self) -> None:
        self._processor_s, self._wall_s = time.thread_time(), time.perf_counter()

    def take(self) -> float:
        """Return the seconds since the last call, or since the start."""
        wall_s = time.perf_counter()
        spent_s, self._wall_s = wall_s - self._wall_s, wall_s
        if spent_s > SHORT_S:
            processor_s = time.thread_time()
            spent_s, self._processor_s = min(spent_s, processor_s - self._processor_s), processor_s
        return spent_s


class Matcher(ABC):
    """Grammar state of one request, used by one thread at a time. The end token is kept here and reaches no engine.

    Attributes:
        num_text_tokens: accepted tokens, EOS not counted.
        error: why the engine gave up (a resource limit), or None. From then on the mask is all zeros.
        usage: shared by the matchers of one program.
    """

    error: str | None = None
    # Whether `write_row` edits the row of an inner matcher, and whether `renew` may help where a limit was met.
    reads_inner = False
    is_renewable = False

    def __init__(self, vocabulary: Vocabulary, usage: Usage | None = None) -> None:
        self.vocabulary = vocabulary
        self.usage = Usage() if usage is None else usage
        self.num_text_tokens = 0
        self.num_ends = 0  # accepted EOS: with `ignore_eos` there may be several

    @property
    def has_ended(self) -> bool:
        """Whether EOS was accepted."""
        return self.num_ends > 0

    @abstractmethod
    def _take(self, token_id: int) -> bool:
        """Advance by one token of text; False, with nothing changed, when it is not allowed here."""

    @abstractmethod
    def _take_back(self, num_tokens: int) -> None:
        """Undo the last tokens of text, at least one."""

    @abstractmethod
    def is_completed(self) -> bool:
        """Return whether the text so far is a complete sentence, so that EOS is allowed."""

    def fill_row(self, words: np.ndarray, address: int) -> None:
        """Write the allowed tokens into a row, int32 [words], which is at an address in memory."""
        if len(words) != self.vocabulary.num_words:
            raise ValueError(f"a bitmask row has {self.vocabulary.num_words} words, got {len(words)}")
        if self.has_ended:
            words[:] = self.vocabulary.eos_mask
        else:
            self._fill(words, address)

    @abstractmethod
    def _fill(self, words: np.ndarray, address: int) -> None:
        """Write the allowed tokens of a text that has not ended."""

    def fill_draft(self, draft: Sequence[int], bitmask: np.ndarray, row: int) -> int:
        """Write the mask after each p tokens of a draft into row + p; return how many tokens are allowed."""
        num_accepted, address, row_bytes = 0, bitmask.ctypes.data, bitmask.strides[0]
        try:
            while True:
                place = row + num_accepted
                self.fill_row(bitmask[place], address + place * row_bytes)
                is_over = num_accepted == len(draft) or self.is_terminated()
                if is_over or not self.accept_token(draft[num_accepted]):
                    return num_accepted
                num_accepted += 1
        finally:  # even if the matcher fails
            if num_accepted:
                self.rollback(num_accepted)

    def accept_token(self, token_id: int) -> bool:
        """Advance by one token; False, with nothing changed, when it is not allowed here."""
        if token_id in self.vocabulary.eos_set:
            can_end = self.has_ended or (self.error is None and self.is_completed())
            self.num_ends += can_end
            return can_end
        if self.has_ended or not 0 <= token_id < self.vocabulary.size:
            return False
        is_taken = self._take(token_id)
        self.num_text_tokens += is_taken
        return is_taken

    def accept_allowed(self, token_id: int) -> bool:
        """Advance by a token that the last mask allows; where the engine can, other threads run Python meanwhile."""
        return self.accept_token(token_id)

    def fill_next_token_bitmask(self, bitmask: np.ndarray, row: int = 0) -> None:
        """Write the allowed tokens into one row of an int32 [rows, ceil(V/32)] bitmask."""
        fill_bitmask([self], [row], bitmask)

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` accepted tokens, EOS included."""
        num_ends = max(0, min(num_tokens, self.num_ends))
        num_text = num_tokens - num_ends
        if not 0 <= num_text <= self.num_text_tokens:
            num_accepted = self.num_text_tokens + self.num_ends
            raise ValueError(f"cannot roll back {num_tokens} tokens of {num_accepted}")
        if num_text:
            self._take_back(num_text)
            self.num_text_tokens -= num_text
        self.num_ends -= num_ends

    def renew(self) -> bool:
        """Go on with a new lexer or higher limits after a limit was met, at the same place; False if nothing helps.

        It takes some milliseconds: the grammar is compiled again, and the accepted tokens are taken again.
        """
        return False

    def is_terminated(self) -> bool:
        """Return whether EOS was accepted."""
        return self.has_ended

    def forced_text(self) -> bytes:
        """Return the bytes that any continuation begins with, b"" where there is a choice; nothing changes."""
        return b"" if self.has_ended or self.error is not None else self._find_forced()

    def _find_forced(self) -> bytes:
        return b""


class OuterMatcher(Matcher):
    """A matcher around another one; by itself it changes nothing.

    Attributes:
        inner: the matcher around which this one stands.
    """

    def __init__(self, inner: Matcher) -> None:
        super().__init__(inner.vocabulary, inner.usage)
        self.inner = inner

    @property
    def error(self) -> str | None:  # type: ignore[override]
        return self.inner.error

    @property
    def reads_inner(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_renewable(self) -> bool:  # type: ignore[override]
        return self.inner.is_renewable

    def _fill(self, words: np.ndarray, address: int) -> None:
        if self.reads_inner:
            self.inner.fill_row(words, address)
        self.write_row(words)

    def write_row(self, words: np.ndarray) -> None:
        """Change the row of the inner matcher, or write another one."""

    def _take(self, token_id: int) -> bool:
        return self.inner.accept_token(token_id)

    def _take_back(self, num_tokens: int) -> None:
        self.inner.rollback(num_tokens)

    def is_completed(self) -> bool:
        return self.inner.is_completed()

    def renew(self) -> bool:
        return self.inner.renew()

    def _find_forced(self) -> bytes:
        return self.inner.forced_text()


class StoppableMatcher(OuterMatcher):
    """A matcher with other tokens that end a text. They are allowed exactly where it may end."""

    def __init__(self, inner: Matcher, stop_token_ids: Iterable[int]) -> None:
        super().__init__(inner)
        self._stop_ids = frozenset(stop_token_ids) - self.vocabulary.eos_set
        self._mask = make_mask(self._stop_ids, self.vocabulary.size)

    def accept_token(self, token_id: int) -> bool:
        if token_id not in self._stop_ids or self.has_ended:
            return super().accept_token(token_id)
        can_end = self.error is None and self.is_completed()
        self.num_ends += can_end
        return can_end

    def write_row(self, words: np.ndarray) -> None:
        if self.error is None and self.is_completed():
            words |= self._mask
        else:
            words &= ~self._mask


def fill_bitmask(matchers: Sequence[Matcher], rows: Sequence[int], bitmask: np.ndarray) -> None:
    """Write the mask of each matcher into its row, one after the other; matchers of different backends may mix."""
    if len(matchers) != len(rows):
        raise ValueError(f"{len(matchers)} matchers need as many rows, got {len(rows)}")
    check_bitmask(bitmask, rows)
    address, row_bytes, clock = bitmask.ctypes.data, bitmask.strides[0], MaskClock()
    for matcher, row in zip(matchers, rows, strict=True):
        matcher.fill_row(bitmask[row], address + row * row_bytes)
        matcher.usage.note_mask(clock.take())


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
        given = f"{len(matchers)} matchers, {len(drafts)} drafts and {len(rows)} rows"
        raise ValueError(f"{given} do not belong together")
    if not any(drafts):
        fill_bitmask(matchers, rows, bitmask)
        return [0] * len(matchers)
    counts, clock = list[int](), MaskClock()
    for matcher, draft, row in zip(matchers, drafts, rows, strict=True):
        check_bitmask(bitmask, [row, row + len(draft)])
        counts.append(matcher.fill_draft(draft, bitmask, row))
        matcher.usage.note_mask(clock.take() / (counts[-1] + 1))
    return counts


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
