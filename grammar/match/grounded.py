"""Grounded strings: strings that have to be quotations from a source text, token by token.

A matcher around the matcher of the schema without the annotation. Inside a grounded string a token is left in the
mask when what it spells leads on to a quotation; a quote, when the string is one. What lies outside such strings
is the inner matcher's. A string that is open can always be finished, so this alone makes no dead ends; residual
checks beside it can (distinct quotations from a source that has no more of them), and then `error` says so.
"""

from collections.abc import Callable, Sequence

import numpy as np

from ..backend import Matcher, Program
from ..bit_row import clear_bits, is_set, list_tokens, set_bits
from ..bitmask import fill_bitmask
from ..errors import InvalidGrammar
from ..schema.grounding import GroundedPlace, GroundingMap, Lengths
from ..schema.rules import GROUNDED
from ..vocabulary import Vocabulary, make_mask
from .json_text import Mode, State, advance, begin
from .prefix_index import StringTokens
from .source_text import SourceText

# Beyond that many tokens one numpy call is cheaper than bits set one by one.
MAX_NUM_SINGLE_BITS = 64


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
        """Return the row of the tokens that may follow this content; the ones with several quotes unchecked."""
        found = self.source.find_tokens(content, lengths)
        row = make_mask(list(found.token_ids), self.vocabulary.size)
        return row | self.tokens.quoted if found.can_close or (not content and not lengths.least) else row


class GroundedMatcher:
    """Grammar state of one request with grounded strings."""

    def __init__(self, inner: Matcher, program: GroundedProgram) -> None:
        self.inner = inner
        self.filler = FILLER
        self._program = program
        self._text = bytearray()
        # Before each accepted text token: its length and the state it led to.
        self._history: list[tuple[int, State]] = []
        self._state = begin(program.root)
        self._dead_end: str | None = None

    @property
    def error(self) -> str | None:
        """Why nothing is allowed any more, or None."""
        return self.inner.error or self._dead_end

    def accept_token(self, token_id: int) -> bool:
        """Advance by one token; False, with nothing changed, when it is not allowed here."""
        vocabulary = self._program.vocabulary
        if token_id in vocabulary.eos_token_ids:
            return self.inner.accept_token(token_id)
        if not self.inner.accept_token(token_id):
            return False
        token = vocabulary.token_bytes[token_id]
        state = self._read(token)
        if state is None:
            self.inner.rollback(1)
            return False
        self._history.append((len(token), self._state))
        self._text += token
        self._state = state
        return True

    def fill_next_token_bitmask(self, bitmask: np.ndarray, row: int = 0) -> None:
        """Write the allowed tokens into one row."""
        self.inner.fill_next_token_bitmask(bitmask, row)
        if not self.is_terminated():
            self.clear_ungrounded(bitmask[row])

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` accepted tokens, EOS included."""
        num_text = num_tokens - (self.is_terminated() and num_tokens > 0)
        self.inner.rollback(num_tokens)
        self._dead_end = None
        for _ in range(num_text):
            length, self._state = self._history.pop()
            del self._text[len(self._text) - length :]

    def is_completed(self) -> bool:
        """Tell whether the text so far is a complete sentence, so that EOS is allowed."""
        return self.inner.is_completed()

    def is_terminated(self) -> bool:
        """Tell whether EOS was accepted."""
        return self.inner.is_terminated()

    def clear_ungrounded(self, words: np.ndarray) -> None:
        """Clear the tokens of one mask, int32 [words], that lead to no quotation where one has to be."""
        self._dead_end = None
        self._clear_tokens(words)
        if not words.any():
            self._dead_end = (
                f"dead end: no way on satisfies {GROUNDED} together with what else the schema demands"
            )

    def _clear_tokens(self, words: np.ndarray) -> None:
        state, program = self._state, self._program
        lengths = state.site.lengths if isinstance(state.site, GroundedPlace) else None
        if state.mode is Mode.END or (state.site is None and state.frame is None):
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
        if len(found.token_ids) > MAX_NUM_SINGLE_BITS:
            kept = make_mask(list(found.token_ids), program.vocabulary.size)
            words &= kept | program.tokens.quoted if found.can_close else kept
            return
        # Few tokens: bit by bit, which is cheaper than a row of its own.
        kept_ids = [token_id for token_id in found.token_ids if is_set(words, token_id)]
        if found.can_close:
            words &= program.tokens.quoted
        else:
            words.fill(0)
        set_bits(words, kept_ids)

    def _clear_wrong(self, words: np.ndarray, candidates: np.ndarray) -> None:
        """Clear those of some tokens that cannot be read here; looked at one by one."""
        token_bytes = self._program.vocabulary.token_bytes
        found = list_tokens(words & candidates)
        clear_bits(words, [token_id for token_id in found if self._read(token_bytes[token_id]) is None])

    def _read(self, token: bytes) -> State | None:
        """Return the state after a token that the inner matcher allows, None where a string is no quotation."""
        state = advance(self._state, self._text, token, self._is_quotation)
        if state is None or state.mode is not Mode.STRING or not isinstance(state.site, GroundedPlace):
            return state
        if state.site.lengths is None:
            return state
        split, start = len(self._text), state.start + 1
        content = bytes(self._text[start:]) + token if start < split else token[start - split :]
        return state if self._program.source.is_open(content, state.site.lengths) else None

    def _is_quotation(self, site: GroundedPlace, value: bytes, before: Callable[[], bytes]) -> bool:
        if site.lengths is None or not value.startswith(b'"'):
            return True
        return self._program.source.is_quotation(value[1:-1], site.lengths)


class GroundedFiller:
    """Fills the rows of many grounded matchers: the inner matchers' rows at once, then what quotations demand."""

    def fill(self, matchers: Sequence[GroundedMatcher], rows: Sequence[int], bitmask: np.ndarray) -> None:
        """Write matcher i's mask into row rows[i]."""
        fill_bitmask([matcher.inner for matcher in matchers], rows, bitmask)
        for matcher, row in zip(matchers, rows, strict=True):
            matcher.clear_ungrounded(bitmask[row])


# It has no state; one object makes all grounded matchers of a batch one group.
FILLER = GroundedFiller()


def add_quotations(
    program: Program, places: GroundingMap, source: str, vocabulary: Vocabulary, tokens: StringTokens
) -> GroundedProgram:
    """Return a program whose annotated strings are quotations from a source.

    Raises:
        InvalidGrammar: no part of the source has the length that a string must have.
    """
    grounded = GroundedProgram(program, places, source, vocabulary, tokens)
    for pointer, lengths in places.list_lengths():
        grounded.first_mask(lengths)
        if not grounded.source.is_open(b"", lengths):
            at_most = "" if lengths.most is None else f" and at most {lengths.most}"
            wanted = f"at least {lengths.least}{at_most} characters"
            raise InvalidGrammar(f"{GROUNDED} at {pointer or '#'}: no part of the source has {wanted}")
    return grounded
