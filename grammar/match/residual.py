"""Residual checks: keywords that no engine enforces are checked at the token that completes a value.

A matcher around the matcher of a weakened grammar. Where a token would complete a value that violates the schema
that surely applies to it, the token is taken out of the mask and refused; so nothing invalid can be finished. A value
that can no longer become valid ends in a mask of zeros, and `error` names the keyword.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..backend import Matcher, OuterMatcher
from ..bitmask import clear_bits, is_set, list_tokens, set_bits
from ..errors import InvalidGrammar
from ..schema.node import Node
from ..schema.places import NO_STRINGS, Check, Place, spell
from .checks import ResidualChecks, make_comparable, read_elements
from .closing_tokens import TokenClass
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


@dataclass(slots=True)
class OpenString:
    """Facts about the string that is open, kept from mask to mask.

    Attributes:
        start: offset of its opening quote.
        near: the strings with a verdict of their own that it may still become, in JSON's spelling.
        is_fine: the verdict on it if it becomes none of them; None while not known.
        verdicts: what follows its quote in a token -> whether that is allowed if it becomes none of them.
        unknown: of each token that reaches further, its bit of the mask; 0 once it is known to be allowed.
        violation: a check that was failed by a verdict.
    """

    start: int
    near: list[bytes]
    is_fine: bool | None = None
    verdicts: dict[bytes, bool] = field(default_factory=dict)
    unknown: np.ndarray | None = None
    violation: Check | None = None


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
        self._string: OpenString | None = None

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
        """Whether the value is complete, so that only what follows it can come."""
        return self._state.mode is Mode.END

    @property
    def error(self) -> str | None:  # type: ignore[override]
        """Why nothing is allowed any more, or None."""
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
        self._dead_end = self._string = None

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
        state, tokens = self._state, self._checks.tokens
        if state.mode is Mode.NUMBER and state.frame is None and not self.is_completed():
            words &= ~tokens.eos_mask
        if state.mode in STRINGS and not state.is_escaped:
            self._clear_in_string(words)
        elif state.mode is not Mode.END:
            self._clear_outside(words)
        if self._failure is None:
            self._clear_repeats(words)
        if self._failure is not None:
            words[:] = 0
        elif not words.any():
            self._dead_end = explain_dead_end(self._violation)

    def _clear_outside(self, words: np.ndarray) -> None:
        """Clear candidates outside strings, and those after a backslash inside a string."""
        state = self._state
        num_closers = state.frame.num_closers if state.frame else 0
        name = "escaped quote" if state.is_escaped else "any"
        has_checks = state.place is not None and state.place.checks
        if has_checks and (state.is_escaped or state.mode is Mode.NUMBER):
            num_closers = 0
            name = name if state.is_escaped else "delimiter"
        if num_closers < FAR:
            self._clear_candidates(words, self._checks.tokens.get_class(name, num_closers).find(words))

    def _clear_candidates(self, words: np.ndarray, candidates: Sequence[int]) -> None:
        wrong = [i for i in candidates[:MAX_NUM_CANDIDATES] if not self._is_candidate_allowed(i)]
        clear_bits(words, [*wrong, *candidates[MAX_NUM_CANDIDATES:]])

    def _clear_in_string(self, words: np.ndarray) -> None:
        """Clear the tokens that end the open string, and those that complete a value around it too."""
        state, tokens, place = self._state, self._checks.tokens, self._state.place
        known = self._find_known(place)
        special = NO_STRINGS
        if known is not None and known.near:
            # An escape can spell any character, so it may lead to one of these too.
            length = len(self._text) - state.start - 1
            special = tokens.escaping.union(string[length:] for string in known.near)
        if place is not None and place.checks:
            if known is None:
                self._clear_prefixes(words)
                # Allow as many further checks for tokens that continue after the closing quote.
                self._num_checks += len(self._verdicts)
            else:
                self._clear_endings(words, known, special)
        num_closers = state.frame.num_closers if state.frame else 0
        if num_closers < FAR:
            far = tokens.get_class("far quote", num_closers)
            # The value after a property name depends on the name.
            if known is None or state.mode is Mode.NAME:
                self._clear_candidates(words, far.find(words))
            else:
                self._clear_far(words, far, known, special)
        if known is not None:
            # Later masks reuse these verdicts.
            known.violation = self._violation = self._violation or known.violation

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

    def _find_known(self, place: Place | None) -> OpenString | None:
        """Return what is known of the open string; None where its verdict may depend on all of its content."""
        start = self._state.start
        strings = place.strings if place is not None else NO_STRINGS
        if strings is None:
            return None
        content = bytes(self._text[start + 1 :])
        known = self._string
        if known is None or known.start != start:
            siblings = self._list_siblings() if place is not None and place.is_compared else ()
            known = self._string = OpenString(start, [*strings, *siblings])
        known.near = [string for string in known.near if string.startswith(content)]
        # Escapes are not decoded here; few strings contain any.
        return None if b"\\" in content else known

    def _list_siblings(self) -> list[bytes]:
        """Return the strings that stand before the open one in its array, in JSON's spelling."""
        frame = self._state.frame
        assert frame is not None and not frame.is_object, "only elements are compared with siblings"
        before = bytes(self._text[frame.start : self._state.start])
        return [spell(value) for value in read_elements(before) if isinstance(value, str)]

    def _clear_far(self, words: np.ndarray, far: TokenClass, known: OpenString, special: frozenset[bytes]) -> None:
        """Clear the tokens that complete a value around the open string: one verdict for each that ends it alike."""
        tokens, wrong = self._checks.tokens, []
        if known.unknown is None:
            known.unknown = far.bits.copy()
        for position in far.find_positions(words, far.bits if special else known.unknown):
            token_id = far.token_ids[position]
            prefix, rest = tokens.parts[token_id]
            if prefix in special:
                is_allowed = self._is_candidate_allowed(token_id)
            else:
                verdict = known.verdicts.get(rest)
                is_allowed = self._is_candidate_allowed(token_id) if verdict is None else verdict
                # Beyond the number of checks for one mask a token counts as wrong, but only for this mask.
                if len(self._verdicts) < self._num_checks:
                    known.verdicts[rest] = is_allowed
                    known.unknown[position] *= not (is_allowed and prefix not in tokens.escaping)
            if not is_allowed:
                wrong.append(token_id)
        clear_bits(words, wrong)

    def _clear_endings(self, words: np.ndarray, known: OpenString, special: frozenset[bytes]) -> None:
        """Clear the tokens that end a string which is checked itself, all with one verdict but a few."""
        tokens = self._checks.tokens
        found = [i for prefix in special for i in tokens.by_prefix.get(prefix, ()) if is_set(words, i)]
        if known.is_fine is None:
            plain = (i for i in tokens.get_class("quote", 0).find(words) if i not in found)
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
        tokens, verdicts, wrong = self._checks.tokens, dict[bytes, bool](), []
        for token_id in tokens.get_class("quote", 0).find(words):
            prefix = tokens.parts[token_id][0]
            if prefix not in verdicts:
                is_tried = len(verdicts) < self._num_checks
                verdicts[prefix] = is_tried and self._is_end_allowed(token_id)
            if not verdicts[prefix]:
                wrong.append(token_id)
        clear_bits(words, wrong)

    def _is_end_allowed(self, token_id: int) -> bool:
        """Return whether a string may end at the quote of a token."""
        end = self._checks.tokens.parts[token_id][0] + b'"'
        return advance(self._state, self._text, end, self._is_fine) is not None

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
