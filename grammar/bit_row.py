"""One row of a bitmask, int32 [ceil(V/32)]: single tokens read and written."""

from collections.abc import Iterable

import numpy as np

# BITS[i] has bit i set; int32 has no positive number for bit 31.
BITS = (np.uint32(1) << np.arange(32, dtype=np.uint32)).view(np.int32)


def is_set(words: np.ndarray, token_id: int) -> bool:
    """Tell whether a row allows a token."""
    return bool(words[token_id >> 5] & BITS[token_id & 31])


def set_bits(words: np.ndarray, token_ids: Iterable[int]) -> None:
    """Allow tokens in a row."""
    for token_id in token_ids:
        words[token_id >> 5] |= BITS[token_id & 31]


def clear_bits(words: np.ndarray, token_ids: Iterable[int]) -> None:
    """Take tokens out of a row."""
    for token_id in token_ids:
        words[token_id >> 5] &= ~BITS[token_id & 31]


def list_tokens(words: np.ndarray) -> list[int]:
    """Return the ids of the tokens that a row allows."""
    index = np.flatnonzero(words)
    if not len(index):
        return []
    word, bit = np.nonzero(np.unpackbits(words[index].view(np.uint8), bitorder="little").reshape(-1, 32))
    found: list[int] = (32 * index[word] + bit).tolist()
    return found
