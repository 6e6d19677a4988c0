"""NumberBound: ends a JSON number that gets long, since a model may write digits without end."""

import re
from collections.abc import Sequence

import numpy as np

from ..vocabulary import Vocabulary, make_mask

MAX_NUMBER_CHARS = 24
MAX_EXPONENT_DIGITS = 2

_CHARS = frozenset(b"0123456789+-.eE")
_NUMBER = re.compile(rb"[-+.0-9eE]*\Z")
_LONG_EXPONENT = re.compile(rb"[eE][-+]?[0-9]{%d,}\Z" % MAX_EXPONENT_DIGITS)
_ENDS = frozenset(b",}] \t\r\n<)")  # what may stand behind a number


class NumberBound:
    """Edits the masks of texts with JSON in them."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokens = vocabulary.token_bytes
        self._number_tokens = frozenset(
            index for index, token in enumerate(self._tokens) if token and _CHARS.issuperset(token)
        )
        begun = [(index, token[0]) for index, token in enumerate(self._tokens) if token]
        self._ends = ~make_mask([index for index, first in begun if first in _CHARS], vocabulary.size)
        others = [index for index, first in begun if first not in _CHARS | _ENDS]
        self._text = make_mask(others, vocabulary.size)

    def apply(self, token_ids: Sequence[int], words: np.ndarray) -> None:
        """Take the tokens that continue a number out of a mask, if it is as long as it may be and can end.

        A number that the schema wants longer, such as a `const`, cannot end before. Where anything may come
        next that ends no number, the digits are in a string or in free text.

        Args:
            token_ids: the text so far.
            words: its mask, int32 [ceil(V/32)].
        """
        if not token_ids or token_ids[-1] not in self._number_tokens or not self._is_long(token_ids):
            return
        left = words & self._ends
        if left.any() and not (words & self._text).any():
            words[:] = left

    def _is_long(self, token_ids: Sequence[int]) -> bool:
        end = b""
        for token_id in reversed(token_ids):
            end = self._tokens[token_id] + end
            if token_id not in self._number_tokens or len(end) >= MAX_NUMBER_CHARS:
                break
        found = _NUMBER.search(end)
        number = b"" if found is None else found[0]
        return len(number) >= MAX_NUMBER_CHARS or _LONG_EXPONENT.search(number) is not None
