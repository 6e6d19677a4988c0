"""Jump-forward: the tokens of a text that the grammar leaves no choice about, to be appended without sampling.

The forced text is what every allowed token begins with, carried on as far as that goes. It is cut into tokens by
the model's own tokenizer, and a token counts as determined only where no allowed token reaches beyond the end of
the forced text: there the model might have chosen one that spells the same and more.
(SGLang's "compressed finite state machine" and XGrammar's jump-forward decoding are the sources of the idea.)
"""

from collections.abc import Callable, Sequence

import numpy as np

from ..backend import Matcher
from ..bit_row import list_tokens
from ..bitmask import allocate_bitmask
from ..vocabulary import Vocabulary

# A mask with more words than that has a choice in it; the forced ones have a few prefixes of one text.
MAX_NUM_WORDS = 256
MAX_FORCED_BYTES = 512


class JumpForward:
    """Finds forced tokens for the matchers of one vocabulary. Used by one thread at a time.

    Args:
        encode: the tokenizer: bytes of a text -> the token ids it would be written with.
    """

    def __init__(self, vocabulary: Vocabulary, encode: Callable[[bytes], Sequence[int]]) -> None:
        self._vocabulary = vocabulary
        self._encode = encode
        # [1, words], used over and over.
        self._bitmask = allocate_bitmask(1, vocabulary.size)

    def find_tokens(self, matcher: Matcher) -> list[int]:
        """Return the token ids that have to come next, [] where there is a choice; the matcher stays as it is.

        The end of the text is left to sampling, as it is where it is the only way on.
        """
        if matcher.is_terminated():
            return []
        text = self.find_text(matcher)
        found: list[int] = []
        position = 0
        for token_id in self._encode(text) if text else ():
            token = self._vocabulary.token_bytes[token_id] if 0 <= token_id < self._vocabulary.size else b""
            if not token or not text.startswith(token, position):
                break
            if self._reaches_beyond(matcher, len(text) - position) or not matcher.accept_token(token_id):
                break
            found.append(token_id)
            position += len(token)
        matcher.rollback(len(found))
        return found

    def find_text(self, matcher: Matcher) -> bytes:
        """Return the bytes that any continuation begins with; the matcher stays as it is."""
        text = b""
        num_tokens = 0
        while len(text) < MAX_FORCED_BYTES:
            allowed = self._list_allowed(matcher)
            if not allowed:
                break
            tokens = [self._vocabulary.token_bytes[token_id] for token_id in allowed]
            first, last = min(tokens), max(tokens)
            length = next(
                (i for i, pair in enumerate(zip(first, last, strict=False)) if pair[0] != pair[1]), None
            )
            # All tokens agree on the whole of the first in order, which then is a prefix of all others.
            if length is not None or not first:
                text += first[:length] if length else b""
                break
            if not matcher.accept_token(allowed[tokens.index(first)]):
                break
            num_tokens += 1
            text += first
        matcher.rollback(num_tokens)
        return text

    def _list_allowed(self, matcher: Matcher) -> list[int]:
        """Return the allowed tokens, [] when they are many."""
        matcher.fill_next_token_bitmask(self._bitmask)
        words = self._bitmask[0]
        if np.count_nonzero(words) > MAX_NUM_WORDS:
            return []
        return list_tokens(words)

    def _reaches_beyond(self, matcher: Matcher, num_left: int) -> bool:
        """Tell whether an allowed token is longer than what is left of the forced text."""
        allowed = self._list_allowed(matcher)
        return not allowed or any(
            len(self._vocabulary.token_bytes[token_id]) > num_left for token_id in allowed
        )
