"""What every grammar engine offers: the protocols its one file implements.

GrammarSpec --Backend.compile--> Program --new_matcher--> Matcher --BatchFiller.fill--> bitmask rows
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from .plan import PlanEntry
from .spec import GrammarSpec


class Matcher(Protocol):
    """Grammar state of one request. Used by one thread at a time."""

    @property
    def filler(self) -> "BatchFiller":
        """The engine's batch fill, shared by all matchers of one backend."""

    @property
    def error(self) -> str | None:
        """Why the engine gave up (a resource limit), or None. From then on the mask is all zeros."""

    def accept_token(self, token_id: int) -> bool:
        """Advance by one token; False, with nothing changed, when it is not allowed here."""

    def accept_tokens(self, token_ids: Sequence[int]) -> int:
        """Advance by tokens as long as they are allowed; return how many were."""

    def fill_next_token_bitmask(self, bitmask: np.ndarray, row: int = 0) -> None:
        """Write the allowed tokens into one row of an int32 [rows, ceil(V/32)] bitmask."""

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` accepted tokens, EOS included."""

    def is_completed(self) -> bool:
        """Tell whether the text so far is a complete sentence, so that EOS is allowed."""

    def is_terminated(self) -> bool:
        """Tell whether EOS was accepted."""

    def forced_text(self) -> bytes:
        """Return the bytes that any continuation begins with, b"" where there is a choice; nothing changes."""


class BatchFiller(Protocol):
    """Fills the rows of many matchers of one backend at once."""

    # Any: a filler takes the matchers of its own backend, which its callers have grouped.
    def fill(self, matchers: Sequence[Any], rows: Sequence[int], bitmask: np.ndarray) -> None:
        """Write matcher i's mask into row rows[i]; none of the matchers is terminated."""


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
