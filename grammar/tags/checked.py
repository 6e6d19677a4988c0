"""Texts with values that llguidance enforces only in part: residual checks beside the one grammar.

The grammar has the weakened schema of such a value, and as an alternative a marker: a token without text. Where the
text before a value has been written, llguidance says whether the marker could come, so whether the value begins there.
From there on a matcher of its own follows the value to its end.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ..backend import Matcher, OuterMatcher, Program
from ..bitmask import clear_bits, is_set
from ..engines.llguidance_backend import LLGuidanceBackend, LLGuidanceMatcher
from ..match.checks import ResidualChecks
from ..match.closing_tokens import TokenClass
from ..match.residual import ResidualMatcher
from .counted_text import CountedMatcher, TextLimit
from .text_value import TextCheck, TextMatcher

# Where a value may begin in a token, and what may complete a part of it behind that.
_BEGIN, _CLOSE = re.compile(rb'[\[{"\-0-9tfn]'), re.compile(rb'[}\],"\s<)]')
ValueMatcher = ResidualMatcher | TextMatcher | CountedMatcher


@dataclass(frozen=True, slots=True)
class CheckedValue:
    """A place in a text at which a value with checks begins.

    Attributes:
        number: what stands in the grammar behind the marker.
        lead: the last bytes of the text before each such value; b"" where it may be anything.
        checks: of the value.
    """

    number: int
    lead: bytes
    checks: ResidualChecks | TextCheck | TextLimit

    def begin(self, inner: Matcher, text: bytes) -> ValueMatcher | None:
        """Return a matcher after the first bytes of the value; None if they break a check."""
        match self.checks:
            case ResidualChecks():
                return ResidualMatcher.start_inside(inner, self.checks, text)
            case TextLimit():
                return CountedMatcher(inner, self.checks, text)
        return TextMatcher.start_inside(inner, self.checks, text)


# The bytes of the lead before a token, those in it, and the tokens, each with the beginning of the value.
Opening = tuple[bytes, bytes, list[tuple[int, bytes]]]


@dataclass
class CheckedVocabulary:
    """What the checks of one vocabulary need, made when it is first asked for."""

    backend: LLGuidanceBackend
    _with: dict[bytes, TokenClass] = field(default_factory=dict)

    @property
    def marker(self) -> int:
        return self.backend.marker

    @cached_property
    def spellings(self) -> tuple[bytes, ...]:
        """The bytes of each token, of a special one its name."""
        vocabulary = self.backend.vocabulary
        names = {token_id: name.encode() for name, token_id in vocabulary.special_tokens.items()}
        return tuple(names.get(token_id, data) for token_id, data in enumerate(vocabulary.token_bytes))

    def list_with(self, byte: bytes) -> TokenClass:
        """Return the tokens in which a byte stands."""
        if byte not in self._with:
            tokens = self.spellings
            found = [token_id for token_id, data in enumerate(tokens) if byte in data]
            self._with[byte] = TokenClass(np.array(sorted(found, key=lambda i: len(tokens[i])), np.int64))
        return self._with[byte]

    @cached_property
    def _sorted(self) -> list[tuple[bytes, int]]:
        tokens = self.backend.vocabulary.token_bytes
        return sorted((data, token_id) for token_id, data in enumerate(tokens) if data and b"\xff" not in data)

    @cached_property
    def _splits(self) -> list[tuple[bytes, int, bytes]]:
        """The tokens in which a value may begin and be completed in part, with what stands before and from there on."""
        return [
            (data[: found.start()], token_id, data[found.start() :])
            for data, token_id in self._sorted
            for found in _BEGIN.finditer(data)
            if _CLOSE.search(data, found.end())
        ]

    def list_openings(self, lead: bytes) -> list[Opening]:
        """Return, for each way to split a lead, the tokens in which a value begins and may be completed in part."""
        found: dict[tuple[bytes, bytes], list[tuple[int, bytes]]] = {}
        for head, token_id, rest in self._splits:
            if head.endswith(lead):
                found.setdefault((b"", head), []).append((token_id, rest))
            elif lead.endswith(head):
                found.setdefault((lead[: len(lead) - len(head)], head), []).append((token_id, rest))
        return [(before, head, tokens) for (before, head), tokens in found.items()]

    def spell(self, data: bytes) -> list[int] | None:
        """Return tokens of these bytes, None if the vocabulary has none."""
        ids: list[int] = []
        while data:
            size = next((size for size in range(len(data), 0, -1) if data[:size] in self._ids), 0)
            if not size:
                return None
            ids.append(self._ids[data[:size]])
            data = data[size:]
        return ids

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        return dict(self._sorted)


class CheckedProgram:
    """The checked values of one grammar, and the tokens in which they may begin."""

    def __init__(self, tables: CheckedVocabulary, values: Sequence[CheckedValue]) -> None:
        self.tables = tables
        self.values = {value.number: value for value in values}
        self.leads = tuple(dict.fromkeys(value.lead for value in values))
        self.num_kept = max(map(len, self.leads))

    @cached_property
    def openings(self) -> list[Opening]:
        return [opening for lead in self.leads for opening in self.tables.list_openings(lead)]

    def find_value(self, inner: LLGuidanceMatcher, tail: bytes, head: bytes) -> CheckedValue | None:
        """Return the value that begins after a text and further bytes."""
        text = tail + head
        leads = [lead for lead in self.leads if text.endswith(lead)]
        ids = self.tables.spell(head) if leads else None
        if ids is None or inner.count_valid([*ids, self.tables.marker]) <= len(ids):
            return None
        for value in self.values.values():
            number = self.tables.spell(b"%d;" % value.number)
            assert number is not None, "every vocabulary has digits"
            whole = [*ids, self.tables.marker, *number]
            if value.lead in leads and inner.count_valid(whole) == len(whole):
                return value
        return None


class CheckedMatcher(OuterMatcher):
    """Grammar state of one request.

    Args:
        inner: the matcher of the grammar with the markers.
    """

    inner: LLGuidanceMatcher

    def __init__(self, inner: Matcher, program: CheckedProgram) -> None:
        super().__init__(inner)
        assert isinstance(inner, LLGuidanceMatcher), "such grammars go to llguidance"
        self._program = program
        # The matcher of the value that is being written, and the last bytes of the text.
        self._checker: ValueMatcher | None = None
        self._tail = b""
        # Both before each accepted text token.
        self._history: list[tuple[ValueMatcher | None, bytes]] = []

    @property
    def error(self) -> str | None:  # type: ignore[override]
        return self.inner.error or (None if self._checker is None else self._checker.error)

    def _take(self, token_id: int) -> bool:
        if token_id == self._program.tables.marker:
            return False
        data, checker = self._program.tables.spellings[token_id], self._checker
        begun = [*self._find_begins(data)]
        taker = self.inner if checker is None else checker
        if not taker.accept_token(token_id):
            return False
        after = None if checker is None or checker.is_value_complete else checker
        for value, text in begun:
            after = value.begin(self.inner, text)
            if after is None:
                taker.rollback(1)
                return False
            after = None if after.is_value_complete else after
        self._history.append((checker, self._tail))
        self._checker = after
        self._tail = (self._tail + data)[-self._program.num_kept :] if self._program.num_kept else b""
        return True

    def _find_begins(self, data: bytes) -> Iterator[tuple[CheckedValue, bytes]]:
        """Yield the values that begin in a token, with their first bytes."""
        text, num_before = self._tail + data, len(self._tail)
        for lead in self._program.leads:
            for at in range(len(data)):
                if text.endswith(lead, 0, num_before + at):
                    value = self._program.find_value(self.inner, self._tail, data[:at])
                    # Where text may go on instead, the first byte tells.
                    if value is None or value.lead != lead:
                        continue
                    if not isinstance(value.checks, ResidualChecks) or _BEGIN.match(data, at):
                        yield value, data[at:]

    def _take_back(self, num_tokens: int) -> None:
        for _ in range(num_tokens):
            self._checker, self._tail = self._history.pop()
            (self.inner if self._checker is None else self._checker).rollback(1)

    def write_row(self, words: np.ndarray) -> None:
        program = self._program
        clear_bits(words, [program.tables.marker])
        if self._checker is not None:
            self._checker.write_row(words)
        for before, head, tokens in program.openings:
            if not self._tail.endswith(before):
                continue
            allowed = [(token_id, text) for token_id, text in tokens if is_set(words, token_id)]
            value = program.find_value(self.inner, self._tail, head) if allowed else None
            if value is not None:
                clear_bits(words, [token_id for token_id, text in allowed if value.begin(self.inner, text) is None])


def add_values(program: Program, tables: CheckedVocabulary, values: Sequence[CheckedValue]) -> Program:
    """Return a program whose grammar marks values, with the checks of these values."""
    if not values:
        return program
    checked, make_inner = CheckedProgram(tables, values), program.new_matcher
    return Program(lambda: CheckedMatcher(make_inner(), checked), program.size_bytes, usage=program.usage)
