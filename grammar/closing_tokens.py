"""Which tokens of a vocabulary can complete a JSON value: the few that a residual check has to look at."""

import re

import numpy as np

from .vocabulary import Vocabulary, make_mask

# What leads to a value or begins it, but completes none; a number is complete only at what follows it.
_OPENER = re.compile(rb'[\s:,\[{]*(?:"[^"]*|[-+.eE0-9]+)?')
_DELIMITER = re.compile(rb"[,}\]\s]")
# Tokens with more brackets than that are looked at wherever as many are needed.
MAX_NUM_CLOSERS = 8


class ClosingTokens:
    """Bitmask rows, int32 [ceil(V/32)], of the tokens that may complete a value in one or another situation.

    quote: inside a string that is checked. delimiter: inside a number that is checked. far quote: inside another
    string. any: elsewhere. Each with a number of brackets that have to be closed first.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.token_bytes = vocabulary.token_bytes
        self.eos_token_ids = frozenset(vocabulary.eos_token_ids)
        self.eos_mask = vocabulary.eos_mask
        # bits[i] has bit i set; int32 has no positive number for bit 31.
        self.bits = (np.uint32(1) << np.arange(32, dtype=np.uint32)).view(np.int32)
        self._lengths = np.array([len(token) for token in vocabulary.token_bytes])
        classes = {
            "quote": has_quote,
            "delimiter": has_delimiter,
            "far quote": reaches_far,
            "any": is_closing,
        }
        texts = list(enumerate(vocabulary.token_bytes))
        self._classes = {
            name: make_mask([index for index, token in texts if test(token)], vocabulary.size)
            for name, test in classes.items()
        }
        closers = [(index, token.count(b"}") + token.count(b"]")) for index, token in texts]
        self._closers = [
            make_mask([index for index, count in closers if count >= needed], vocabulary.size)
            for needed in range(MAX_NUM_CLOSERS + 1)
        ]

    def find(self, words: np.ndarray, name: str, num_closers: int) -> list[int]:
        """Return the allowed tokens of a class that close at least so many brackets, the shortest first."""
        found = words & self._classes[name]
        if num_closers:
            found &= self._closers[min(num_closers, MAX_NUM_CLOSERS)]
        # Most words are zero, so only the others are unpacked.
        index = np.flatnonzero(found)
        if not len(index):
            return []
        word, bit = np.nonzero(np.unpackbits(found[index].view(np.uint8), bitorder="little").reshape(-1, 32))
        token_ids = 32 * index[word] + bit
        order = np.argsort(self._lengths[token_ids], kind="stable")
        return token_ids[order].tolist()


def has_quote(token: bytes) -> bool:
    """Tell whether a token may end a string."""
    return b'"' in token


def has_delimiter(token: bytes) -> bool:
    """Tell whether a token may end a number."""
    return _DELIMITER.search(token) is not None


def reaches_far(token: bytes) -> bool:
    """Tell whether a token may end a string and complete something after it."""
    _, quote, rest = token.partition(b'"')
    return bool(quote) and not _OPENER.fullmatch(rest)


def is_closing(token: bytes) -> bool:
    """Tell whether a token may complete a value, begun before it or in it."""
    return not _OPENER.fullmatch(token)
