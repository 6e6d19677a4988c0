"""Residual checks: keywords that no engine enforces are checked at the token that completes a value.

A matcher around the matcher of a loosened grammar. Where a token would complete a value that violates the schema
that surely applies to it, the token is taken out of the mask and refused; so nothing invalid can be finished. It
does not steer: a value that can no longer become valid ends in a mask of zeros, and `error` names the keyword.
"""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from .backend import Matcher, Program
from .bitmask import fill_bitmask
from .closing_tokens import ClosingTokens
from .json_schema.sites import Check, Site, SiteMap
from .json_text import FAR, Mode, State, advance, begin
from .validator import SchemaValidator

# Per mask, the shortest tokens first: how many are tried, and how many different values validated for them. What is
# beyond is left out of the mask; shorter tokens spell the same text.
MAX_NUM_CANDIDATES = 512
MAX_NUM_CHECKS = 48


class ResidualProgram:
    """A loosened grammar with the checks that make it exact again."""

    def __init__(self, inner: Program, schema: dict[str, Any], sites: SiteMap, tokens: ClosingTokens) -> None:
        self.sites = sites
        self.tokens = tokens
        self._inner = inner
        self._schema = schema
        self._validators: dict[str, SchemaValidator] = {"": SchemaValidator(schema)}
        # The engine's grammar, the document and one validator for each checked place.
        self.size_bytes = inner.size_bytes + 32 * len(json.dumps(schema))

    def new_matcher(self) -> "ResidualMatcher":
        """Return a matcher at the start of the grammar."""
        return ResidualMatcher(self._inner.new_matcher(), self)

    def find_violation(self, site: Site, value: bytes) -> Check | None:
        """Return the first check that a complete value fails."""
        try:
            instance = json.loads(value)
        except (ValueError, RecursionError):
            # Not UTF-8, or a number of more digits than Python reads: what cannot be checked is not let through.
            return site.checks[0]
        return next((c for c in site.checks if not self._validator(c.pointer).is_valid(instance)), None)

    def _validator(self, pointer: str) -> SchemaValidator:
        if pointer not in self._validators:
            self._validators[pointer] = SchemaValidator(self._schema, pointer)
        return self._validators[pointer]


class ResidualMatcher:
    """Grammar state of one request whose values are checked as they are completed."""

    def __init__(self, inner: Matcher, program: ResidualProgram) -> None:
        self.inner = inner
        self.filler = FILLER
        self._program = program
        self._text = bytearray()
        # Before each accepted text token: its length and the state it led to.
        self._history: list[tuple[int, State]] = []
        self._state = begin(program.sites.root)
        self._violation: Check | None = None
        self._dead_end: str | None = None
        self._verdicts: dict[tuple[int, bytes], Check | None] = {}

    @property
    def error(self) -> str | None:
        """Why nothing is allowed any more, or None."""
        return self.inner.error or self._dead_end

    def accept_token(self, token_id: int) -> bool:
        """Advance by one token; False, with nothing changed, when it is not allowed here."""
        tokens = self._program.tokens
        if token_id in tokens.eos_token_ids:
            return self.is_completed() and self.inner.accept_token(token_id)
        if not self.inner.accept_token(token_id):
            return False
        token = tokens.token_bytes[token_id]
        state = advance(self._state, self._text, token, self._is_allowed)
        if state is None:
            self.inner.rollback(1)
            return False
        self._history.append((len(token), self._state))
        self._text += token
        self._state = state
        self._verdicts.clear()
        return True

    def fill_next_token_bitmask(self, bitmask: np.ndarray, row: int = 0) -> None:
        """Write the allowed tokens into one row."""
        self.inner.fill_next_token_bitmask(bitmask, row)
        if not self.is_terminated():
            self.clear_violations(bitmask[row])

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` accepted tokens, EOS included."""
        num_text = num_tokens - (self.inner.is_terminated() and num_tokens > 0)
        self.inner.rollback(num_tokens)
        for _ in range(num_text):
            length, self._state = self._history.pop()
            del self._text[len(self._text) - length :]
        self._dead_end = None
        self._verdicts.clear()

    def is_completed(self) -> bool:
        """Tell whether the text so far is a complete sentence, so that EOS is allowed."""
        if not self.inner.is_completed():
            return False
        # Only a number is complete without a byte that ends it.
        return self._state.mode is not Mode.NUMBER or self._is_allowed(
            self._program.sites.root, bytes(self._text)
        )

    def is_terminated(self) -> bool:
        """Tell whether EOS was accepted."""
        return self.inner.is_terminated()

    def clear_violations(self, words: np.ndarray) -> None:
        """Clear the tokens of one mask, int32 [words], that would complete a value that violates its schema."""
        self._forget()
        self._clear_candidates(words)
        if self._violation is not None and not words.any():
            names = ", ".join(self._violation.keywords)
            self._dead_end = f"dead end: no way on satisfies {names} at {self._violation.pointer or '#'}"

    def _forget(self) -> None:
        self._violation = self._dead_end = None

    def _clear_candidates(self, words: np.ndarray) -> None:
        tokens = self._program.tokens
        if self._state.mode is Mode.NUMBER and self._state.frame is None and not self.is_completed():
            words &= ~tokens.eos_mask
        kind = self._candidate_kind()
        if kind is not None:
            candidates = tokens.find(words, *kind)
            for number, token_id in enumerate(candidates):
                token = tokens.token_bytes[token_id]
                if number >= MAX_NUM_CANDIDATES or not self._is_candidate_allowed(token):
                    words[token_id >> 5] &= ~tokens.bits[token_id & 31]

    def _candidate_kind(self) -> tuple[str, int] | None:
        """Return which tokens may complete a checked value: the class of ClosingTokens, and the brackets needed."""
        state = self._state
        if state.mode is Mode.END:
            return None
        num_closers = state.frame.num_closers if state.frame else 0
        is_checked = state.site is not None and bool(state.site.checks)
        if state.mode is Mode.STRING and is_checked:
            return "quote", 0
        if state.mode is Mode.NUMBER and is_checked:
            return "delimiter", 0
        if num_closers >= FAR:
            return None
        in_string = state.mode in (Mode.STRING, Mode.NAME)
        return "far quote" if in_string else "any", num_closers

    def _is_candidate_allowed(self, token: bytes) -> bool:
        judge = self._is_allowed if len(self._verdicts) < MAX_NUM_CHECKS else self._is_known_allowed
        return advance(self._state, self._text, token, judge) is not None

    def _is_allowed(self, site: Site, value: bytes) -> bool:
        key = id(site), value
        if key not in self._verdicts:
            self._verdicts[key] = self._program.find_violation(site, value)
        violation = self._verdicts[key]
        self._violation = violation or self._violation
        return violation is None

    def _is_known_allowed(self, site: Site, value: bytes) -> bool:
        key = id(site), value
        return key in self._verdicts and self._is_allowed(site, value)


class ResidualFiller:
    """Fills the rows of many residual matchers: the engines' rows at once, then the checks."""

    def fill(self, matchers: Sequence[ResidualMatcher], rows: Sequence[int], bitmask: np.ndarray) -> None:
        """Write matcher i's mask into row rows[i]."""
        fill_bitmask([matcher.inner for matcher in matchers], rows, bitmask)
        for matcher, row in zip(matchers, rows, strict=True):
            matcher.clear_violations(bitmask[row])


# It has no state; one object makes all residual matchers of a batch one group.
FILLER = ResidualFiller()
