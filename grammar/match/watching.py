"""A matcher around another one that follows the JSON text and looks at every value that a token completes."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..backend import Matcher
from ..bitmask import fill_bitmask
from ..vocabulary import Vocabulary
from .json_text import Place, State, advance, begin


class WatchingMatcher(Matcher):
    """Grammar state of one request whose values are checked as they are completed.

    Attributes:
        inner: the matcher of the grammar without the checks.
    """

    def __init__(self, inner: Matcher, vocabulary: Vocabulary, root: Place | None) -> None:
        super().__init__(vocabulary)
        self.inner = inner
        self.filler = FILLER
        self._text = bytearray()
        self._state = begin(root)
        # Before each accepted text token: its length and the state it led to.
        self._history: list[tuple[int, State]] = []

    @abstractmethod
    def clear_violations(self, words: np.ndarray) -> None:
        """Clear the tokens of one mask, int32 [words], that complete a value which fails a check."""

    @abstractmethod
    def _is_fine(self, place: Any, value: bytes, before: Callable[[], bytes]) -> bool:
        """Return whether a value may be complete at a place; `before` gives the text of its container up to it."""

    def _read(self, token: bytes) -> State | None:
        """Return the state after a token that the inner matcher allows, None where a check fails."""
        return advance(self._state, self._text, token, self._is_fine)

    def _take(self, token_id: int) -> bool:
        if not self.inner.accept_token(token_id):
            return False
        token = self.vocabulary.token_bytes[token_id]
        state = self._read(token)
        if state is None:
            self.inner.rollback(1)
            return False
        self._history.append((len(token), self._state))
        self._text += token
        self._state = state
        return True

    def _take_back(self, num_tokens: int) -> None:
        self.inner.rollback(num_tokens)
        for _ in range(num_tokens):
            length, self._state = self._history.pop()
            del self._text[len(self._text) - length :]

    def is_completed(self) -> bool:
        """Return whether the text so far is a complete sentence."""
        return self.inner.is_completed()

    def _find_forced(self) -> bytes:
        return self.inner.forced_text()


class WatchingFiller:
    """Fills the rows of many such matchers: the inner matchers' rows at once, then what the checks clear."""

    def fill(self, matchers: Sequence[WatchingMatcher], rows: Sequence[int], bitmask: np.ndarray) -> None:
        """Write matcher i's mask into row rows[i]."""
        fill_bitmask([matcher.inner for matcher in matchers], rows, bitmask)
        for matcher, row in zip(matchers, rows, strict=True):
            matcher.clear_violations(bitmask[row])


# It has no state; one object makes all such matchers of a batch one group.
FILLER = WatchingFiller()
