"""Grounded strings: strings that have to be quotations from a source text, token by token.

A matcher around the matcher of the schema without the annotation. Inside a grounded string a token is left in the
mask when the string can still become a quotation after it; a quote, when the string is one. All other masks are the
inner matcher's. A string that is open can always be finished, so this alone makes no dead ends; residual
checks beside it can (distinct quotations from a source that has no more of them), and then `error` says so.
"""

from collections.abc import Callable

import numpy as np

from ..backend import Matcher, Program
from ..bit_row import clear_bits, list_tokens
from ..errors import InvalidGrammar
from ..schema.grounding import GroundedPlace, GroundingMap, Lengths
from ..schema.rules import GROUNDED
from ..vocabulary import Vocabulary, make_mask
from .json_text import Mode, State
from .source_text import SourceText
from .string_tokens import StringTokens
from .watching import WatchingMatcher


class GroundedProgram:
    """A grammar whose grounded strings are parts of one source text."""

    def __init__(
        self, inner: Program, places: GroundingMap, source: str, vocabulary: Vocabulary, tokens: StringTokens
    ) -> None:
        self.source = SourceText(source, tokens)
        self.vocabulary = vocabulary
        self.tokens = tokens
        self.root = places.root
        self._inner = inner
        # (content, lengths) -> its mask; only for contents that come up in every string.
        self._first_masks: dict[tuple[str, Lengths], np.ndarray] = {}
        self.size_bytes = inner.size_bytes + 64 * len(self.source.spelling) + 256 * 1024

    def new_matcher(self) -> "GroundedMatcher":
        """Return a matcher at the start of the grammar."""
        return GroundedMatcher(self._inner.new_matcher(), self)

    def first_mask(self, lengths: Lengths) -> np.ndarray:
        """Return the row of the tokens that may come after the opening quote."""
        key = "inside", lengths
        if key not in self._first_masks:
            self._first_masks[key] = self.make_row(b"", lengths)
        return self._first_masks[key]

    def opening_mask(self, lengths: Lengths) -> np.ndarray:
        """Return the row of all tokens but those that open a quotation with content that leads to none."""
        key = "opening", lengths
        if key not in self._first_masks:
            contents = self.tokens.contents
            wrong = [i for i, content in contents.items() if not self.source.is_open(content, lengths)]
            self._first_masks[key] = ~make_mask(wrong, self.vocabulary.size)
        return self._first_masks[key]

    def make_row(self, content: bytes, lengths: Lengths) -> np.ndarray:
        """Return the row of the tokens that may follow this content; tokens with several quotes are not checked."""
        found = self.source.find_tokens(content, lengths)
        row = make_mask(found.token_ids, self.vocabulary.size)
        return row | self.tokens.quoted if found.can_close or (not content and not lengths.least) else row


class GroundedMatcher(WatchingMatcher):
    """Grammar state of one request with grounded strings."""

    def __init__(self, inner: Matcher, program: GroundedProgram) -> None:
        super().__init__(inner, program.vocabulary, program.root)
        self._program = program
        self._dead_end: str | None = None

    @property
    def error(self) -> str | None:  # type: ignore[override]
        """Why nothing is allowed any more, or None."""
        return self.inner.error or self._dead_end

    def _take_back(self, num_tokens: int) -> None:
        super()._take_back(num_tokens)
        self._dead_end = None

    def clear_violations(self, words: np.ndarray) -> None:
        """Clear the tokens of one mask, int32 [words], that lead to no quotation where one has to be."""
        self._dead_end = None
        self._clear_tokens(words)
        if not words.any():
            self._dead_end = (
                f"dead end: no continuation satisfies {GROUNDED} together with what else the schema demands"
            )

    def _clear_tokens(self, words: np.ndarray) -> None:
        state, program = self._state, self._program
        lengths = state.place.lengths if isinstance(state.place, GroundedPlace) else None
        if state.mode is Mode.END or (state.place is None and state.frame is None):
            return
        if state.mode is Mode.STRING or state.mode is Mode.NAME:
            if state.mode is Mode.STRING and lengths is not None:
                self._clear_inside(words, bytes(self._text[state.start + 1 :]), lengths)
            self._clear_wrong(words, program.tokens.several)
            return
        if state.mode is Mode.VALUE and lengths is not None:
            words &= program.opening_mask(lengths)
        self._clear_wrong(words, program.tokens.mixed)

    def _clear_inside(self, words: np.ndarray, content: bytes, lengths: Lengths) -> None:
        """Keep the tokens that go on with a quotation or end it."""
        program = self._program
        if not content:
            words &= program.first_mask(lengths)
            return
        found = program.source.find_tokens(content, lengths)
        kept = make_mask(found.token_ids, program.vocabulary.size)
        words &= kept | program.tokens.quoted if found.can_close else kept

    def _clear_wrong(self, words: np.ndarray, candidates: np.ndarray) -> None:
        """Clear the candidates that `_read` rejects, each checked individually."""
        token_bytes = self._program.vocabulary.token_bytes
        found = list_tokens(words & candidates)
        clear_bits(words, [token_id for token_id in found if self._read(token_bytes[token_id]) is None])

    def _read(self, token: bytes) -> State | None:
        """Return the state after a token that the inner matcher allows, None where a string is no quotation."""
        state = super()._read(token)
        if state is None or state.mode is not Mode.STRING or not isinstance(state.place, GroundedPlace):
            return state
        if state.place.lengths is None:
            return state
        split, start = len(self._text), state.start + 1
        content = bytes(self._text[start:]) + token if start < split else token[start - split :]
        return state if self._program.source.is_open(content, state.place.lengths) else None

    def _is_fine(self, place: GroundedPlace, value: bytes, before: Callable[[], bytes]) -> bool:
        if place.lengths is None or not value.startswith(b'"'):
            return True
        return self._program.source.is_quotation(value[1:-1], place.lengths)


def add_quotations(
    program: Program, places: GroundingMap, source: str, vocabulary: Vocabulary, tokens: StringTokens
) -> GroundedProgram:
    """Return a program whose annotated strings are quotations from a source.

    Raises:
        InvalidGrammar: no part of the source has the length that a string must have.
    """
    grounded = GroundedProgram(program, places, source, vocabulary, tokens)
    for pointer, lengths in places.lengths:
        grounded.first_mask(lengths)
        if not grounded.source.is_open(b"", lengths):
            at_most = "" if lengths.most is None else f" and at most {lengths.most}"
            wanted = f"at least {lengths.least}{at_most} characters"
            raise InvalidGrammar(f"{GROUNDED} at {pointer or '#'}: no part of the source has {wanted}")
    return grounded
