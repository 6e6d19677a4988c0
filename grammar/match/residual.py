"""Residual checks: keywords that no engine enforces are checked at the token that completes a value.

A matcher around the matcher of a weakened grammar. Where a token would complete a value that violates the schema
that surely applies to it, the token is taken out of the mask and refused; so nothing invalid can be finished. A value
that can no longer become valid ends in a mask of zeros, and `error` names the keyword.
"""

import json
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from ..backend import Matcher, OuterMatcher
from ..bitmask import clear_bits, is_set, list_tokens
from ..errors import InvalidGrammar
from ..schema.node import Node
from ..schema.places import Check, Place
from .checks import ResidualChecks, make_comparable, read_elements
from .closing_tokens import spell
from .json_text import FAR, Mode, State, advance, begin

# Limits per mask, shortest tokens first: tokens tried, and different values validated. The mask leaves out the rest;
# shorter tokens spell the same text.
MAX_NUM_CANDIDATES = 512
MAX_NUM_CHECKS = 64
# Where a pattern may backtrack, longer strings get fewer checks, because each may take a millisecond.
SHORT = 256
# Reason in the error message if tokens were left out only because of the text after them.
DISTINCT = Check(Node("", {}), ("uniqueItems",), True)
STRINGS = (Mode.STRING, Mode.NAME)


class ResidualMatcher(OuterMatcher):
    """Grammar state of one request whose values are checked as they are completed."""

    def __init__(self, inner: Matcher, checks: ResidualChecks) -> None:
        super().__init__(inner)
        self._text = bytearray()
        self._state = begin(checks.places.root)
        # Before each accepted text token: its length and the state it led to.
        self._history: list[tuple[int, State]] = []
        self._checks = checks
        self._violation: Check | None = None
        self._dead_end: str | None = None
        # Why checking stopped permanently.
        self._failure: str | None = None
        self._num_checks = MAX_NUM_CHECKS
        self._verdicts: dict[tuple[int, bytes, bytes], Check | None] = {}

    @classmethod
    def start_inside(cls, inner: Matcher, checks: ResidualChecks, text: bytes) -> "ResidualMatcher | None":
        """Return a matcher after the first bytes of a value inside a longer text; None if they break a check.

        Args:
            inner: has taken the token that ends with these bytes; the matcher moves it on.
        """
        matcher = cls(inner, checks)
        return matcher if matcher._advance(text) else None

    @property
    def is_value_complete(self) -> bool:
        return self._state.mode is Mode.END

    @property
    def error(self) -> str | None:  # type: ignore[override]
        return self.inner.error or self._failure or self._dead_end

    def _take(self, token_id: int) -> bool:
        if self._failure is not None or not self.inner.accept_token(token_id):
            return False
        token, before = self.vocabulary.token_bytes[token_id], self._state
        if not self._advance(token):
            self.inner.rollback(1)
            return False
        self._history.append((len(token), before))
        self._verdicts.clear()
        return True

    def _advance(self, token: bytes) -> bool:
        state = advance(self._state, self._text, token, self._is_fine)
        if state is not None:
            self._text += token
            self._state = state
        return state is not None

    def _take_back(self, num_tokens: int) -> None:
        self.inner.rollback(num_tokens)
        for _ in range(num_tokens):
            length, self._state = self._history.pop()
            del self._text[len(self._text) - length :]
        self._verdicts.clear()
        self._dead_end = None

    def is_completed(self) -> bool:
        if not self.inner.is_completed():
            return False
        # Only a number is complete without a byte that ends it.
        return self._state.mode is not Mode.NUMBER or self._is_fine(self._checks.places.root, bytes(self._text), bytes)

    def write_row(self, words: np.ndarray) -> None:
        self._violation = self._dead_end = None
        self._num_checks = MAX_NUM_CHECKS
        if self._checks.may_backtrack and self._state.mode in STRINGS:
            self._num_checks = max(MAX_NUM_CHECKS * SHORT // (SHORT + len(self._text) - self._state.start), 2)
        if self._state.mode is Mode.NUMBER and self._state.frame is None and not self.is_completed():
            words &= ~self._checks.tokens.eos_mask
        if self._state.mode is not Mode.END:
            self._clear_invalid(words)
        if self._failure is None:
            self._clear_repeats(words)
        if self._failure is not None:
            words[:] = 0
        elif not words.any():
            self._dead_end = explain_dead_end(self._violation)

    def _clear_invalid(self, words: np.ndarray) -> None:
        """Clear the tokens that complete a value which violates its schema."""
        state = self._state
        num_closers = state.frame.num_closers if state.frame else 0
        has_checks = state.place is not None and bool(state.place.checks)
        name = "any"
        if state.mode in STRINGS and not state.is_escaped:
            name = "far quote"
            if has_checks:
                self._clear_endings(words)
                # Allow as many further checks for tokens that continue after the closing quote.
                self._num_checks += len(self._verdicts)
        elif state.is_escaped or (has_checks and state.mode is Mode.NUMBER):
            name = "escaped quote" if state.is_escaped else "delimiter"
            num_closers = 0 if has_checks else num_closers
        if num_closers < FAR:
            self._clear_candidates(words, self._checks.tokens.get_class(name, num_closers).find(words))

    def _clear_candidates(self, words: np.ndarray, candidates: Sequence[int]) -> None:
        wrong = [i for i in candidates[:MAX_NUM_CANDIDATES] if not self._is_candidate_allowed(i)]
        clear_bits(words, [*wrong, *candidates[MAX_NUM_CANDIDATES:]])

    def _clear_repeats(self, words: np.ndarray) -> None:
        """Clear the tokens after which an element could only become one that stands before it."""
        frame = self._state.frame
        place = frame.place if frame else None
        if frame is None or place is None or not place.distinct:
            return
        near = [place.element(self._state.position + step) for step in (0, 1)]
        if not any(element is not None and element.choices for element in near):
            return
        # If values are listed, few tokens are allowed.
        allowed = list_tokens(words)[:MAX_NUM_CANDIDATES]
        wrong = [i for i in allowed if self._leads_to_repeat(self._checks.tokens.token_bytes[i])]
        clear_bits(words, wrong)
        if wrong and self._violation is None:
            self._violation = DISTINCT

    def _leads_to_repeat(self, token: bytes) -> bool:
        """Return whether the open element, continued by an allowed token, can equal none of the listed values left."""
        state = advance(self._state, self._text, token, lambda *_: True)
        if state is None or state.frame is None or state.frame.is_object:
            return False
        place, is_begun = state.place, state.mode in (Mode.STRING, Mode.NUMBER)
        if place is None or place.choices is None or not (is_begun or state.mode is Mode.VALUE):
            return False
        # The array may begin in the token itself.
        text = (bytes(self._text[state.frame.start :]) + token)[max(state.frame.start - len(self._text), 0) :]
        start = state.start - state.frame.start if is_begun else len(text)
        known = {make_comparable(value) for value in read_elements(text[:start])}
        left = [value for value in place.choices if make_comparable(value) not in known]
        return not any(each.startswith(text[start:]) for value in left for each in spell_choice(value))

    def _clear_endings(self, words: np.ndarray) -> None:
        """Clear the tokens that end a string which is checked itself: one check for all that end it alike."""
        tokens, verdicts, wrong = self._checks.tokens, dict[bytes, bool](), []
        deciding = self._list_deciding()
        if deciding is None:
            candidates = tokens.get_class("quote", 0).find(words)
        else:
            found = (tokens.by_ending.get(ending, ()) for ending in (*deciding, b"\\"))
            candidates = [token_id for token_id in chain.from_iterable(found) if is_set(words, token_id)]
        for token_id in candidates:
            prefix = tokens.prefixes[token_id]
            if prefix not in verdicts:
                is_tried = len(verdicts) < self._num_checks
                verdicts[prefix] = is_tried and bool(advance(self._state, self._text, prefix + b'"', self._is_fine))
            if not verdicts[prefix]:
                wrong.append(token_id)
        clear_bits(words, wrong)

    def _list_deciding(self) -> frozenset[bytes] | None:
        """Return the endings of the open string that it must not have; None if any may be wrong."""
        place, frame = self._state.place, self._state.frame
        content = bytes(self._text[self._state.start + 1 :])
        # Escapes are not decoded here; few strings contain any.
        if frame is None or place is None or b"\\" in content or not all(each.is_distinct for each in place.checks):
            return None
        siblings = read_elements(bytes(self._text[frame.start : self._state.start]))
        spelt = [spell(each) for each in siblings if isinstance(each, str)]
        return frozenset(each[len(content) :] for each in spelt if each.startswith(content))

    def _is_candidate_allowed(self, token_id: int) -> bool:
        token = self._checks.tokens.token_bytes[token_id]
        is_tried = len(self._verdicts) < self._num_checks
        check = self._is_fine if is_tried else self._is_known_allowed
        return advance(self._state, self._text, token, check) is not None

    def _is_fine(self, place: Place, value: bytes, before: Callable[[], bytes]) -> bool:
        key = id(place), value, before() if place.checks[0].is_distinct else b""
        if key not in self._verdicts and self._failure is None:
            try:
                self._verdicts[key] = self._checks.find_violation(place, *key[1:])
            except InvalidGrammar as error:
                self._failure = str(error)
        violation = self._verdicts.get(key)
        self._violation = violation or self._violation
        return violation is None and self._failure is None

    def _is_known_allowed(self, place: Place, value: bytes, before: Callable[[], bytes]) -> bool:
        key = id(place), value, before() if place.checks[0].is_distinct else b""
        return key in self._verdicts and self._is_fine(place, value, before)


def explain_dead_end(violation: Check | None) -> str:
    if violation is None:
        return "dead end: none of the allowed tokens could be checked within the limits"
    return f"dead end: no continuation satisfies {', '.join(violation.keywords)} at {violation.node.pointer or '#'}"


def spell_choice(value: Any) -> list[bytes]:
    """Return how a listed value may be written: a whole number also with a fraction of zero."""
    text = json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return [text, text + b".0"] if isinstance(value, int) else [text]
