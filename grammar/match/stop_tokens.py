"""Tokens that end a text besides the end token: allowed exactly where the grammar may end."""

from collections.abc import Iterable

import numpy as np

from ..backend import Matcher, OuterMatcher
from ..vocabulary import make_mask


class StoppableMatcher(OuterMatcher):
    """Grammar state of one request with stop tokens. Elsewhere one would cut the text off in the middle."""

    def __init__(self, inner: Matcher, stop_token_ids: Iterable[int]) -> None:
        super().__init__(inner)
        self._stop_ids = frozenset(stop_token_ids) - self.vocabulary.eos_set
        self._mask = make_mask(self._stop_ids, self.vocabulary.size)

    def accept_token(self, token_id: int) -> bool:
        if token_id not in self._stop_ids or self.has_ended:
            return super().accept_token(token_id)
        self.has_ended = self.error is None and self.is_completed()
        return self.has_ended

    def write_row(self, words: np.ndarray) -> None:
        if self.error is None and self.is_completed():
            words |= self._mask
        else:
            words &= ~self._mask
