"""Structural tags with values that llguidance enforces only in part: residual checks beside the one grammar.

The grammar has the weakened schema of such a value. A marker token, which no text contains, may replace the value,
so that llguidance reports where one begins. From there on a ResidualMatcher follows the value to its end.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..backend import Matcher
from ..bitmask import clear_beyond, clear_bits, is_set
from ..engines.llguidance_backend import LLGuidanceBackend, LLGuidanceMatcher
from ..limits import GrammarLimits
from ..match.checks import ResidualChecks
from ..match.residual import ResidualMatcher
from ..vocabulary import Vocabulary

_OPENERS = b"{["


@dataclass
class CheckedVocabulary:
    """A vocabulary for such tags: with every byte as a token and with a marker, both behind its own tokens.

    All of it is made when it is first asked for.
    """

    vocabulary: Vocabulary
    limits: GrammarLimits

    @cached_property
    def extended(self) -> Vocabulary:
        known = {data for data in self.vocabulary.token_bytes if len(data) == 1}
        missing = [bytes((byte,)) for byte in range(255) if bytes((byte,)) not in known]
        tokens = [*self.vocabulary.token_bytes, *missing, b""]
        return Vocabulary(tokens, self.vocabulary.eos_token_ids, self.vocabulary.special_tokens)

    @property
    def marker(self) -> int:
        return self.extended.size - 1

    @cached_property
    def byte_ids(self) -> dict[int, int]:
        return {data[0]: index for index, data in enumerate(self.extended.token_bytes) if len(data) == 1}

    @cached_property
    def backend(self) -> LLGuidanceBackend:
        return LLGuidanceBackend(self.extended, self.limits)

    @cached_property
    def openings(self) -> dict[tuple[bytes, bytes], list[tuple[int, bytes]]]:
        """Text before a value and its bracket -> the tokens in which it begins and a part of it may be complete.

        Each token stands with the beginning of the value.
        """
        found: dict[tuple[bytes, bytes], list[tuple[int, bytes]]] = {}
        for token_id, data in enumerate(self.vocabulary.token_bytes):
            for at in [at for at, byte in enumerate(data) if byte in _OPENERS and b"\xff" not in data]:
                value = data[at:]
                if any(sign in value for sign in (b"}", b"]", b",")) or value.count(b'"') > 1:
                    found.setdefault((data[:at], value[:1]), []).append((token_id, value))
        return found

    def spell(self, data: bytes) -> list[int]:
        return [self.byte_ids[byte] for byte in data]


class CheckedMatcher(Matcher):
    """Grammar state of one request.

    Args:
        inner: the matcher of the grammar over the extended vocabulary.
        checks: number of a value, which the grammar has behind the marker -> its brackets and its checks.
    """

    inner: LLGuidanceMatcher

    def __init__(
        self, inner: Matcher, tables: CheckedVocabulary, checks: Mapping[int, tuple[bytes, ResidualChecks]]
    ) -> None:
        super().__init__(tables.vocabulary, inner.usage)
        assert isinstance(inner, LLGuidanceMatcher), "structural tags go to llguidance"
        self.inner = inner
        self._tables = tables
        self._checks = checks
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
            after = self._begin(number, data[at:])
            if after is None:
                (self.inner if checker is None else checker).rollback(1)
                return False
            after = None if after.is_value_complete else after
        self._history.append(checker)
        self._checker = after
        return True

    def _find_begin(self, data: bytes) -> tuple[int, int] | None:
        for at in range(len(data) - 1, -1, -1):
            if data[at] in _OPENERS and (number := self._ask(data[:at], data[at : at + 1])) is not None:
                return number, at
        return None

    def _begin(self, number: int, text: bytes) -> ResidualMatcher | None:
        return ResidualMatcher.start_inside(self.inner, self._checks[number][1], text)

    def _ask(self, head: bytes, opener: bytes) -> int | None:
        """Return the checked value that begins after some bytes with a bracket."""
        tables = self._tables
        ids = [*tables.spell(head), tables.marker]
        if self.inner.count_valid(ids) < len(ids):
            return None
        # An object and an array may begin at the same place, but two values of one type may not.
        for number, (openers, _) in self._checks.items():
            whole = [*ids, *tables.spell(b"%d;" % number)]
            if opener in openers and self.inner.count_valid(whole) == len(whole):
                return number
        return None

    def _take_back(self, num_tokens: int) -> None:
        for _ in range(num_tokens):
            self._checker = self._history.pop()
            (self.inner if self._checker is None else self._checker).rollback(1)

    @property
    def reads_inner(self) -> bool:
        """The row of the inner matcher is one of the extended vocabulary."""
        return False

    def is_completed(self) -> bool:
        return self.inner.is_completed()

    def write_row(self, words: np.ndarray) -> None:
        tables = self._tables
        extended = np.zeros((1, tables.extended.num_words), np.int32)
        self.inner.fill_next_token_bitmask(extended)
        words[:] = extended[0, : len(words)]
        clear_beyond(words, tables.vocabulary.size)
        if self._checker is not None:
            self._checker.write_row(words)
        for (head, opener), openings in tables.openings.items():
            allowed = [(token_id, value) for token_id, value in openings if is_set(words, token_id)]
            number = self._ask(head, opener) if allowed else None
            if number is not None:
                wrong = [token_id for token_id, value in allowed if self._begin(number, value) is None]
                clear_bits(words, wrong)
