"""The interface of grammar engines, and what all matchers share: the end of the text, and rollback.

GrammarSpec --Backend.compile--> Program --new_matcher--> Matcher --BatchFiller.fill--> bitmask rows
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from .bit_row import check_bitmask
from .plan import PlanEntry
from .spec import GrammarSpec
from .vocabulary import Vocabulary

# Longest forced text that is searched for.
MAX_FORCED_BYTES = 512


class Matcher(ABC):
    """Grammar state of one request, used by one thread at a time. The end token is kept here and reaches no engine.

    Attributes:
        filler: the engine's batch fill, shared by all matchers of one backend.
        error: why the engine gave up (a resource limit), or None. From then on the mask is all zeros.
    """

    filler: "BatchFiller"
    error: str | None = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._num_text_tokens = 0
        self._is_terminated = False

    @abstractmethod
    def _take(self, token_id: int) -> bool:
        """Advance by one token of text; False, with nothing changed, when it is not allowed here."""

    @abstractmethod
    def _take_back(self, num_tokens: int) -> None:
        """Undo the last tokens of text, at least one."""

    @abstractmethod
    def is_completed(self) -> bool:
        """Return whether the text so far is a complete sentence, so that EOS is allowed."""

    def fill_row(self, bitmask: np.ndarray, row: int) -> None:
        """Write the allowed tokens of a text that has not ended into one row."""
        self.filler.fill([self], [row], bitmask)

    def accept_token(self, token_id: int) -> bool:
        """Advance by one token; False, with nothing changed, when it is not allowed here."""
        if self._is_terminated or not 0 <= token_id < self.vocabulary.size:
            return False
        if token_id in self.vocabulary.eos_token_ids:
            self._is_terminated = self.error is None and self.is_completed()
            return self._is_terminated
        is_taken = self._take(token_id)
        self._num_text_tokens += is_taken
        return is_taken

    def accept_tokens(self, token_ids: Sequence[int]) -> int:
        """Advance by tokens as long as they are allowed; return how many were."""
        for number, token_id in enumerate(token_ids):
            if not self.accept_token(token_id):
                return number
        return len(token_ids)

    def fill_next_token_bitmask(self, bitmask: np.ndarray, row: int = 0) -> None:
        """Write the allowed tokens into one row of an int32 [rows, ceil(V/32)] bitmask."""
        if self._is_terminated:
            check_bitmask(bitmask, self.vocabulary.num_words, [row])
            bitmask[row] = self.vocabulary.eos_mask
        else:
            self.fill_row(bitmask, row)

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` accepted tokens, EOS included."""
        num_text = num_tokens - (self._is_terminated and num_tokens > 0)
        if not 0 <= num_text <= self._num_text_tokens:
            num_accepted = self._num_text_tokens + self._is_terminated
            raise ValueError(f"cannot roll back {num_tokens} tokens of {num_accepted}")
        if num_text:
            self._take_back(num_text)
            self._num_text_tokens -= num_text
        self._is_terminated = self._is_terminated and num_tokens == 0

    def is_terminated(self) -> bool:
        """Return whether EOS was accepted."""
        return self._is_terminated

    def forced_text(self) -> bytes:
        """Return the bytes that any continuation begins with, b"" where there is a choice; nothing changes."""
        return b"" if self._is_terminated or self.error is not None else self._find_forced()

    def _find_forced(self) -> bytes:
        return b""


class BatchFiller(Protocol):
    """Fills the rows of many matchers of one backend at once."""

    # Any: a filler takes the matchers of its own backend, which its callers have grouped.
    def fill(self, matchers: Sequence[Any], rows: Sequence[int], bitmask: np.ndarray) -> None:
        """Write matcher i's mask into row rows[i]; none of the matchers is terminated."""


@runtime_checkable
class DraftFiller(BatchFiller, Protocol):
    """A batch fill that also fills the masks after drafted tokens, all positions in one call."""

    def is_text(self, token_ids: Sequence[int]) -> bool:
        """Return whether these are tokens of text, so that `fill_drafts` takes them."""

    def fill_drafts(
        self,
        matchers: Sequence[Any],
        drafts: Sequence[Sequence[int]],
        rows: Sequence[int],
        bitmask: np.ndarray,
    ) -> list[int]:
        """Write matcher i's mask after its first p tokens into row rows[i] + p; return how many are allowed."""


class RowFiller:
    """Fills the rows of matchers that write one row each, where a thread would not be worth it."""

    def fill(self, matchers: Sequence[Any], rows: Sequence[int], bitmask: np.ndarray) -> None:
        """Write matcher i's mask into row rows[i]."""
        for matcher, row in zip(matchers, rows, strict=True):
            check_bitmask(bitmask, matcher.vocabulary.num_words, [row])
            matcher.write_row(bitmask[row])


# It has no state; one object makes all such matchers of a batch one group.
ROW_FILLER = RowFiller()


class Program(Protocol):
    """A compiled grammar of one backend."""

    @property
    def size_bytes(self) -> int:
        """Memory it holds, estimated when the engine does not say."""

    def new_matcher(self) -> Matcher:
        """Return a matcher at the start of the grammar."""


class Backend(Protocol):
    """One grammar engine, bound to one vocabulary. Safe to call from several threads."""

    @property
    def name(self) -> str:
        """The name a request may ask for."""

    def compile(self, spec: GrammarSpec) -> Program:
        """Compile or raise GrammarError; never returns a program looser than the spec."""


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar ready for use: who enforces what, and a source of matchers."""

    backend: str
    plan: tuple[PlanEntry, ...]
    program: Program

    def matcher(self) -> Matcher:
        """Return a matcher at the start of the grammar."""
        return self.program.new_matcher()
