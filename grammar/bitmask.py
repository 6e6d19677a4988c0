"""Bitmasks: int32 [rows, ceil(V/32)], bit 1 = token allowed; bits beyond the vocabulary are 0."""

from collections.abc import Iterable, Sequence

import numpy as np

# BITS[i] has bit i set; int32 has no positive number for bit 31.
BITS = (np.uint32(1) << np.arange(32, dtype=np.uint32)).view(np.int32)


def allocate_bitmask(num_rows: int, vocab_size: int) -> np.ndarray:
    """Return a bitmask that allows everything below `vocab_size`."""
    num_words, rest = divmod(vocab_size, 32)
    bitmask = np.full((num_rows, num_words + (rest > 0)), -1, np.int32)
    if rest:
        bitmask[:, -1] = (1 << rest) - 1
    return bitmask


def clear_beyond(words: np.ndarray, vocab_size: int) -> None:
    if rest := vocab_size % 32:
        words[-1] &= np.int32((1 << rest) - 1)


def is_set(words: np.ndarray, token_id: int) -> bool:
    """Return whether a mask of one row allows a token."""
    return bool(words[token_id >> 5] & BITS[token_id & 31])


def clear_bits(words: np.ndarray, token_ids: Iterable[int]) -> None:
    for token_id in token_ids:
        words[token_id >> 5] &= ~BITS[token_id & 31]


def list_tokens(words: np.ndarray) -> list[int]:
    index = np.flatnonzero(words)
    if not len(index):
        return []
    word, bit = np.nonzero(np.unpackbits(words[index].view(np.uint8), bitorder="little").reshape(-1, 32))
    found: list[int] = (32 * index[word] + bit).tolist()
    return found


def check_bitmask(bitmask: np.ndarray, rows: Sequence[int]) -> None:
    """Raise ValueError unless an engine may write into these rows: they are written through raw pointers."""
    if bitmask.dtype != np.int32 or bitmask.ndim != 2:
        raise ValueError(f"a bitmask is int32 [rows, words], got {bitmask.dtype} {list(bitmask.shape)}")
    if not bitmask.flags.c_contiguous or not bitmask.flags.writeable:
        raise ValueError("a bitmask must be contiguous and writeable")
    if rows and not (min(rows) >= 0 and max(rows) < bitmask.shape[0]):
        raise ValueError(f"bitmask rows {list(rows)} must lie in 0..{bitmask.shape[0] - 1}")
