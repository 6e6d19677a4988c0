"""Residual checks: keywords that no engine enforces are checked at the token that completes a value.

A matcher around the matcher of a weakened grammar. Where a token would complete a value that violates the schema
that surely applies to it, the token is taken out of the mask and refused; so nothing invalid can be finished. It
steers only as far as elements and property names are checked on their own: a value that can no longer become valid
ends in a mask of zeros, and `error` names the keyword.
"""

import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ..backend import Matcher, Program
from ..bit_row import clear_bits, is_set, set_bits
from ..errors import InvalidGrammar
from ..schema.node import Node
from ..schema.places import Check, Place, PlaceMap, spell
from .candidates import find_far_kind, find_kind, find_string_place
from .checks import ResidualChecks, read_elements
from .closing_tokens import ClosingTokens, RestOfClass
from .fill import FILLER
from .json_text import Mode, advance
from .open_string import KnownString
from .repeats import LookAhead
from .watching import WatchingMatcher

# Per mask, the shortest tokens first: how many are tried, and how many different values validated for them. What is
# beyond is left out of the mask; shorter tokens spell the same text.
MAX_NUM_CANDIDATES = 512
MAX_NUM_CHECKS = 64
SHORT = 256  # bytes of a string
# Processor time that checks with patterns which backtrack may take: for each token, and saved up at most.
TOKEN_S = 0.004
RESERVED_S = 0.2
# What is named where tokens were left out only because of what comes after them.
DISTINCT = Check(Node("", {}), ("uniqueItems",), True)
NO_STRINGS: frozenset[bytes] = frozenset()


class ResidualProgram:
    """A weakened grammar with the checks that make it exact again."""

    def __init__(
        self, inner: Program, schema: dict[str, Any], places: PlaceMap, tokens: ClosingTokens
    ) -> None:
        self.places = places
        self.tokens = tokens
        self.checks = ResidualChecks(schema, places.root_check)
        self.inner = inner
        # The engine's grammar, the document and one validator for each checked place.
        self.size_bytes = inner.size_bytes + 32 * len(json.dumps(schema))

    def new_matcher(self) -> "ResidualMatcher":
        """Return a matcher at the start of the grammar."""
        return ResidualMatcher(self.inner.new_matcher(), self)

    def begin(self, inner: Matcher, text: bytes) -> "ResidualMatcher | None":
        """Return a matcher after the first bytes of a value inside a longer text; None if they break a check.

        Args:
            inner: has taken the token that ends with these bytes; the matcher moves it on.
        """
        matcher = ResidualMatcher(inner, self)
        return matcher if matcher.begin(text) else None


class ResidualMatcher(WatchingMatcher):
    """Grammar state of one request whose values are checked as they are completed."""

    def __init__(self, inner: Matcher, program: ResidualProgram) -> None:
        super().__init__(inner, program.tokens.vocabulary, program.places.root, FILLER)
        self._program = program
        self._violation: Check | None = None
        self._dead_end: str | None = None
        # Why checking was given up, for good.
        self._failure: str | None = None
        self._seconds_left = RESERVED_S
        self._verdicts: dict[tuple[int, bytes, bytes], Check | None] = {}
        self._string: KnownString | None = None
        self._look_ahead = LookAhead(program.tokens.token_bytes, program.tokens.ids)
        self.settled: RestOfClass | None = None

    @property
    def has_ended(self) -> bool:
        """Whether the value is complete, so that only what follows it can come."""
        return self._state.mode is Mode.END

    def begin(self, text: bytes) -> bool:
        """Take the first bytes of the value, which `inner` has taken; False if they break a check."""
        state = self._read(text)
        if state is not None:
            self._text += text
            self._state = state
        return state is not None

    @property
    def error(self) -> str | None:  # type: ignore[override]
        """Why nothing is allowed any more, or None."""
        return self.inner.error or self._failure or self._dead_end

    def _take(self, token_id: int) -> bool:
        if self._failure is not None or not super()._take(token_id):
            return False
        token = self.vocabulary.token_bytes[token_id]
        if b'"' in token or b"\\" in token:
            self.settled = None
        self._verdicts.clear()
        self._seconds_left = min(self._seconds_left + TOKEN_S, RESERVED_S)
        return True

    def _take_back(self, num_tokens: int) -> None:
        super()._take_back(num_tokens)
        self._dead_end = None
        self._verdicts.clear()
        self._string = self.settled = None

    def is_completed(self) -> bool:
        """Tell whether the text so far is a complete sentence, so that EOS is allowed."""
        if not self.inner.is_completed():
            return False
        # Only a number is complete without a byte that ends it.
        return self._state.mode is not Mode.NUMBER or self._is_fine(
            self._program.places.root, bytes(self._text), bytes
        )

    def clear_violations(self, words: np.ndarray) -> None:
        """Clear the tokens of one mask, int32 [words], that would complete a value that violates its schema."""
        self._forget()
        self._violation = self._find_excluded()
        if self._violation is not None:
            words[:] = 0
        else:
            self._clear_candidates(words)
            self._look_ahead.start()
            self._clear_repeats(words)
        if self._failure is not None:
            self.settled = None
            words[:] = 0
        elif not words.any():
            self._dead_end = explain_dead_end(self._violation)

    def _forget(self) -> None:
        self._violation = self._dead_end = self.settled = None

    def _find_excluded(self) -> Check | None:
        """Return a check that the open string fails whatever is added to it, so that it would go on for ever."""
        state = self._state
        place = find_string_place(state) if state.mode in (Mode.STRING, Mode.NAME) else None
        if place is None:
            return None
        return self._program.checks.find_excluded(place, bytes(self._text[state.start + 1 :]))

    def _clear_candidates(self, words: np.ndarray) -> None:
        tokens, state = self._program.tokens, self._state
        if state.mode is Mode.NUMBER and state.frame is None and not self.is_completed():
            words &= ~tokens.eos_mask
        kind = find_kind(state)
        if kind is None:
            return
        if state.mode in (Mode.STRING, Mode.NAME) and not state.is_escaped:
            known = self._find_string()
            if known is not None:
                self._clear_in_string(words, kind, known)
                return
        if kind[0] == "quote":
            self._clear_prefixes(words)
            kind = find_far_kind(self._state)
        if kind is None:
            return
        candidates = tokens.find(words, *kind)
        wrong = [i for i in candidates[:MAX_NUM_CANDIDATES] if not self._is_candidate_allowed(i)]
        clear_bits(words, [*wrong, *candidates[MAX_NUM_CANDIDATES:]])

    def _clear_repeats(self, words: np.ndarray) -> None:
        """Clear the tokens after which an element could only become one that stands before it."""
        wrong = self._look_ahead.find_wrong(words, self._state, self._text, self._leads_on)
        if wrong is not None:
            self.settled = None
            clear_bits(words, wrong)
        if wrong and self._violation is None:
            self._violation = DISTINCT

    def _leads_on(self, token_id: int) -> bool:
        """Tell whether anything is allowed after a token, and so on."""
        if not self.accept_token(token_id):
            return False
        row = np.zeros((1, len(self._program.tokens.eos_mask)), np.int32)
        try:
            self.inner.fill_next_token_bitmask(row, 0)
            self._clear_candidates(row[0])
            return self._look_ahead.goes_on(row[0], self._state, self._text, self._leads_on)
        finally:
            self.rollback(1)

    def _find_string(self) -> KnownString | None:
        """Return what is known of the open string; None where its verdict may depend on all of its content."""
        place, start = find_string_place(self._state), self._state.start
        strings = place.strings if place is not None else NO_STRINGS
        if strings is None:
            return None
        content = bytes(self._text[start + 1 :])
        known = self._string
        if known is None or known.start != start:
            siblings = self._list_siblings() if place is not None and place.deciding.is_compared else ()
            known = self._string = KnownString(start, [*strings, *siblings])
        known.near = [string for string in known.near if string.startswith(content)]
        known.length = len(content)
        # What escapes spell is not compared here; few strings need any.
        return None if b"\\" in content else known

    def _list_siblings(self) -> list[bytes]:
        """Return the strings that stand before the open one in its array, in JSON's spelling."""
        frame = self._state.frame
        assert frame is not None and not frame.is_object, "only elements are compared with siblings"
        before = bytes(self._text[frame.start : self._state.start])
        return [spell(value) for value in read_elements(before) if isinstance(value, str)]

    def _clear_in_string(self, words: np.ndarray, kind: tuple[str, int], known: KnownString) -> None:
        """Clear candidates inside a string all of whose endings but a few share one verdict."""
        self._clear_endings_and_far(words, kind, known)
        # Later masks only look the verdicts up.
        known.violation = self._violation = self._violation or known.violation

    def _clear_endings_and_far(self, words: np.ndarray, kind: tuple[str, int], known: KnownString) -> None:
        tokens = self._program.tokens
        special = NO_STRINGS
        if known.near:
            # An escape can spell any character, so it may lead to one of these too.
            special = tokens.escaping.union(string[known.length :] for string in known.near)
        is_settled = not known.near
        if kind[0] == "quote":
            self._clear_endings(words, known, special)
            is_settled &= known.is_fine is True
        far = find_far_kind(self._state)
        if far is None:
            self.settled = self._program.tokens.nothing if is_settled else None
            return
        wrong = []
        # What comes after a property name depends on the name.
        is_name = self._state.mode is Mode.NAME
        for token_id in tokens.find(words, *far):
            prefix, rest = tokens.parts[token_id]
            if is_name or prefix in special:
                is_allowed = self._is_candidate_allowed(token_id)
            else:
                verdict = known.verdicts.get(rest)
                is_allowed = self._is_candidate_allowed(token_id) if verdict is None else verdict
                if len(self._verdicts) < MAX_NUM_CHECKS:
                    known.verdicts[rest] = is_allowed
            if not is_allowed:
                wrong.append(token_id)
        clear_bits(words, wrong)
        if is_settled and not (is_name or wrong) and len(self._verdicts) < MAX_NUM_CHECKS:
            self.settled = tokens.get_class(*far).find_rest(words)

    def _clear_endings(self, words: np.ndarray, known: KnownString, special: frozenset[bytes]) -> None:
        """Clear the tokens that end a string which is checked itself."""
        tokens = self._program.tokens
        found = [i for prefix in special for i in tokens.by_prefix.get(prefix, ()) if is_set(words, i)]
        if known.is_fine is None:
            plain = (i for i in tokens.find(words, "quote", 0) if i not in found)
            token_id = next(plain, None)
            if token_id is not None:
                known.is_fine = self._is_end_allowed(token_id)
        fine = [i for i in found if self._is_end_allowed(i)]
        if known.is_fine is False:
            words &= ~tokens.quoted
            set_bits(words, fine)
        else:
            clear_bits(words, [i for i in found if i not in fine])

    def _clear_prefixes(self, words: np.ndarray) -> None:
        """Clear the tokens that end a string which is checked itself: one check for all that end it alike."""
        tokens = self._program.tokens
        num_checks = self._count_checks()
        verdicts: dict[bytes, bool] = {}
        wrong = []
        for token_id in tokens.find(words, "quote", 0):
            prefix = tokens.parts[token_id][0]
            if prefix not in verdicts:
                verdicts[prefix] = len(verdicts) < num_checks and self._is_end_allowed(token_id)
            if not verdicts[prefix]:
                wrong.append(token_id)
        clear_bits(words, wrong)

    def _count_checks(self) -> int:
        """Return how many values may be checked for one mask: where patterns backtrack, fewer of a long string."""
        if not self._program.checks.may_backtrack:
            return MAX_NUM_CHECKS
        return max(MAX_NUM_CHECKS * SHORT // (SHORT + len(self._text) - self._state.start), 2)

    def _is_end_allowed(self, token_id: int) -> bool:
        """Tell whether a string may end at the quote of a token."""
        end = self._program.tokens.parts[token_id][0] + b'"'
        return advance(self._state, self._text, end, self._is_fine) is not None

    def _is_candidate_allowed(self, token_id: int) -> bool:
        token = self._program.tokens.token_bytes[token_id]
        judge = self._is_fine if len(self._verdicts) < MAX_NUM_CHECKS else self._is_known_allowed
        return advance(self._state, self._text, token, judge) is not None

    def _is_fine(self, place: Place, value: bytes, before: Callable[[], bytes]) -> bool:
        key = id(place), value, before() if place.checks[0].is_distinct else b""
        if key not in self._verdicts:
            if self._program.checks.may_backtrack:
                self._check_in_time(key, place)
                if self._failure is not None:
                    return False
            else:
                self._verdicts[key] = self._program.checks.find_violation(place, *key[1:])
        violation = self._verdicts[key]
        self._violation = violation or self._violation
        return violation is None

    def _check_in_time(self, key: tuple[int, bytes, bytes], place: Place) -> None:
        """Find the verdict on a value, or the failure where its patterns take too long."""
        if self._failure is not None:
            return
        start = time.thread_time()
        try:
            self._verdicts[key] = self._program.checks.find_violation(place, *key[1:])
        except InvalidGrammar as error:
            self._failure = str(error)
        self._seconds_left -= time.thread_time() - start
        if self._seconds_left < 0 and self._failure is None:
            self._failure = f"the patterns of the schema take more than {TOKEN_S * 1000:g} ms for each token"

    def _is_known_allowed(self, place: Place, value: bytes, before: Callable[[], bytes]) -> bool:
        key = id(place), value, before() if place.checks[0].is_distinct else b""
        return key in self._verdicts and self._is_fine(place, value, before)


def explain_dead_end(violation: Check | None) -> str:
    """Return the error for a mask of zeros."""
    if violation is None:
        return "dead end: of what the grammar allows here nothing could be checked"
    return f"dead end: no way on satisfies {', '.join(violation.keywords)} at {violation.node.pointer or '#'}"
