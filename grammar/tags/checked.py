"""Structural tags with values that llguidance enforces only in part: residual checks beside the one grammar.

The grammar has the weakened schema of such a value. A marker token, which no text contains, may replace the value,
so that llguidance reports where one begins. From there on a ResidualMatcher follows the value to its end.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..backend import ROW_FILLER, Matcher
from ..bitmask import clear_beyond, clear_bits, is_set
from ..engines.llguidance_backend import LLGuidanceBackend, LLGuidanceMatcher, LLGuidanceProgram
from ..limits import GrammarLimits
from ..match.closing_tokens import ClosingTokens
from ..match.residual import ResidualMatcher, ResidualProgram
from ..vocabulary import Vocabulary

_OPENERS = b"{["


class Opening(NamedTuple):
    """A token in which a value begins and part of it is completed.

    Attributes:
        head: the text before the value.
        value: the beginning of the value in the token.
    """

    token_id: int
    head: bytes
    value: bytes


class CheckedVocabulary:
    """A vocabulary for such tags: with every byte as a token and with a marker, both behind its own tokens.

    All of it is made when it is first asked for.
    """

    def __init__(self, vocabulary: Vocabulary, limits: GrammarLimits) -> None:
        self.vocabulary = vocabulary
        self._limits = limits

    @cached_property
    def extended(self) -> Vocabulary:
        """The vocabulary with bytes and marker."""
        known = {data for data in self.vocabulary.token_bytes if len(data) == 1}
        missing = [bytes((byte,)) for byte in range(255) if bytes((byte,)) not in known]
        tokens = [*self.vocabulary.token_bytes, *missing, b""]
        return Vocabulary(tokens, self.vocabulary.eos_token_ids, self.vocabulary.special_tokens)

    @property
    def marker(self) -> int:
        """The token that stands for a value."""
        return self.extended.size - 1

    @cached_property
    def byte_ids(self) -> dict[int, int]:
        """The token of each byte."""
        return {data[0]: index for index, data in enumerate(self.extended.token_bytes) if len(data) == 1}

    @cached_property
    def backend(self) -> LLGuidanceBackend:
        """The engine of the extended vocabulary."""
        return LLGuidanceBackend(self.extended, self._limits, num_threads=1)

    @cached_property
    def closing(self) -> ClosingTokens:
        """The tables for residual checks."""
        return ClosingTokens(self.extended)

    @cached_property
    def openings(self) -> dict[tuple[bytes, bytes], list[Opening]]:
        """Tokens in which a value begins, by what stands before it and by its bracket."""
        found: dict[tuple[bytes, bytes], list[Opening]] = {}
        for opening in list_openings(self.vocabulary.token_bytes):
            found.setdefault((opening.head, opening.value[:1]), []).append(opening)
        return found

    def spell(self, data: bytes) -> list[int]:
        """Return the tokens of single bytes."""
        return [self.byte_ids[byte] for byte in data]


def list_openings(token_bytes: Sequence[bytes]) -> Iterator[Opening]:
    """Yield the tokens in which a value may begin and a part of it may be complete."""
    for token_id, data in enumerate(token_bytes):
        for at, byte in enumerate(data):
            value = data[at:]
            is_ended = any(sign in value for sign in (b"}", b"]", b",")) or value.count(b'"') > 1
            if byte in _OPENERS and is_ended and b"\xff" not in data:
                yield Opening(token_id, data[:at], value)


class CheckedProgram:
    """A compiled structural tag with residual checks.

    Args:
        checks: number of a value, which the grammar has behind the marker -> its brackets and its checks.
    """

    def __init__(
        self,
        inner: LLGuidanceProgram,
        tables: CheckedVocabulary,
        checks: Mapping[int, tuple[bytes, ResidualProgram]],
    ) -> None:
        self.inner = inner
        self.tables = tables
        self.openers = {number: openers for number, (openers, _) in checks.items()}
        self.checks = {number: program for number, (_, program) in checks.items()}
        self.numbers = {index: tables.spell(b"%d;" % index) for index in checks}
        self.size_bytes = inner.size_bytes + sum(each.size_bytes for each in self.checks.values())

    def new_matcher(self) -> "CheckedMatcher":
        """Return a matcher at the start of the structural tag."""
        return CheckedMatcher(self)


class CheckedMatcher(Matcher):
    """Grammar state of one request."""

    def __init__(self, program: CheckedProgram) -> None:
        super().__init__(program.tables.vocabulary)
        self.filler = ROW_FILLER
        self.program = program
        self.inner: LLGuidanceMatcher = program.inner.new_matcher()
        # The matcher of the value that is being written.
        self._checker: ResidualMatcher | None = None
        # Its state before each accepted text token.
        self._history: list[ResidualMatcher | None] = []

    @property
    def error(self) -> str | None:  # type: ignore[override]
        """Why nothing is allowed any more, or None."""
        return self.inner.error or (None if self._checker is None else self._checker.error)

    def _take(self, token_id: int) -> bool:
        data, checker = self.vocabulary.token_bytes[token_id], self._checker
        begun = self._find_begin(data)
        if not (self.inner if checker is None else checker).accept_token(token_id):
            return False
        after = None if checker is None or checker.is_value_complete else checker
        if begun is not None:
            number, at = begun
            after = self.program.checks[number].begin(self.inner, data[at:])
            if after is None:
                (self.inner if checker is None else checker).rollback(1)
                return False
            after = None if after.is_value_complete else after
        self._history.append(checker)
        self._checker = after
        return True

    def _find_begin(self, data: bytes) -> tuple[int, int] | None:
        """Return which checked value begins in a token, and at which byte."""
        for at in range(len(data) - 1, -1, -1):
            if data[at] in _OPENERS and (number := self._ask(data[:at], data[at : at + 1])) is not None:
                return number, at
        return None

    def _ask(self, head: bytes, opener: bytes) -> int | None:
        """Return the checked value that begins after some bytes with a bracket."""
        tables = self.program.tables
        ids = [*tables.spell(head), tables.marker]
        if self.inner.count_valid(ids) < len(ids):
            return None
        # An object and an array may begin at the same place, but two values of one type may not.
        for number, spelled in self.program.numbers.items():
            whole = [*ids, *spelled]
            if opener in self.program.openers[number] and self.inner.count_valid(whole) == len(whole):
                return number
        return None

    def clear_violations(self, words: np.ndarray) -> None:
        """Clear the tokens of a row of the extended vocabulary that would complete a value that fails a check."""
        if self._checker is not None:
            self._checker.write_row(words)
        for (head, opener), openings in self.program.tables.openings.items():
            allowed = [each for each in openings if is_set(words, each.token_id)]
            number = self._ask(head, opener) if allowed else None
            if number is not None:
                check = self.program.checks[number]
                wrong = [each.token_id for each in allowed if check.begin(self.inner, each.value) is None]
                clear_bits(words, wrong)

    def _take_back(self, num_tokens: int) -> None:
        for _ in range(num_tokens):
            self._checker = self._history.pop()
            (self.inner if self._checker is None else self._checker).rollback(1)

    @property
    def reads_inner(self) -> bool:
        """The row of the inner matcher is one of the extended vocabulary."""
        return False

    def is_completed(self) -> bool:
        """Return whether the text so far is a complete sentence, so that EOS is allowed."""
        return self.inner.is_completed()

    def write_row(self, words: np.ndarray) -> None:
        """Write the allowed tokens into a row, int32 [words]."""
        tables, num_words = self.program.tables, len(words)
        extended = np.zeros((1, tables.extended.num_words), np.int32)
        self.inner.fill_next_token_bitmask(extended)
        self.clear_violations(extended[0])
        words[:] = extended[0, :num_words]
        clear_beyond(words, tables.vocabulary.size)
