"""Free text of at most so many tokens: behind the last one only its end may come."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..backend import Matcher, OuterMatcher
from ..bitmask import is_set
from ..vocabulary import Vocabulary, make_mask


@dataclass(frozen=True, slots=True)
class TextLimit:
    """The limit of one text.

    Attributes:
        ends: the marks behind the text, any of which ends it; none where the whole answer ends with it.
        most: its tokens, the end not counted.
        spellings: the bytes of each token, of a special one its name.
    """

    ends: tuple[bytes, ...]
    most: int
    vocabulary: Vocabulary
    spellings: Sequence[bytes]
    _rows: dict[tuple[bytes, ...], np.ndarray] = field(default_factory=dict)

    def is_ended(self, text: bytes) -> bool:
        return any(end in text for end in self.ends)

    def list_allowed(self, text: bytes) -> np.ndarray:
        """Return the row, int32 [words], of the tokens that go on to an end, or complete an open character."""
        if not self.ends and not is_cut(text):
            return self.vocabulary.eos_mask
        begun = ((end, size) for end in self.ends for size in range(len(end)) if text.endswith(end[:size]))
        rests = () if is_cut(text) else tuple(dict.fromkeys(end[size:] for end, size in begun))
        if rests not in self._rows:
            found = (i for i, data in enumerate(self.spellings) if data and self._fits(data, rests))
            self._rows[rests] = make_mask([*found], self.vocabulary.size)
        return self._rows[rests]

    def _fits(self, data: bytes, rests: tuple[bytes, ...]) -> bool:
        if not rests:
            return all(0x80 <= byte < 0xC0 for byte in data)
        return any(rest.startswith(data) or data.startswith(rest) for rest in rests)


def is_cut(text: bytes) -> bool:
    """Return whether a text ends inside a character."""
    try:
        text[-4:].decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return False


class CountedMatcher(OuterMatcher):
    """Follows a text to its end, and counts its tokens.

    Args:
        text: of the first token of the text.
    """

    def __init__(self, inner: Matcher, limit: TextLimit, text: bytes) -> None:
        super().__init__(inner)
        self._limit = limit
        self._texts = [text]  # after each token

    @property
    def is_value_complete(self) -> bool:
        return self._limit.is_ended(self._texts[-1])

    @property
    def _is_full(self) -> bool:
        return len(self._texts) >= self._limit.most

    def _take(self, token_id: int) -> bool:
        is_allowed = not self._is_full or is_set(self._limit.list_allowed(self._texts[-1]), token_id)
        if not is_allowed or not self.inner.accept_token(token_id):
            return False
        self._texts.append(self._texts[-1] + self._limit.spellings[token_id])
        return True

    def _take_back(self, num_tokens: int) -> None:
        self.inner.rollback(num_tokens)
        del self._texts[-num_tokens:]

    def write_row(self, words: np.ndarray) -> None:
        if self._is_full:
            words &= self._limit.list_allowed(self._texts[-1])
