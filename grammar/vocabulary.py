"""The tokens a grammar is applied to, as bytes."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

import numpy as np

from .bitmask import BITS


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Token bytes in id order, and the ids that end a text.

    Args:
        token_bytes: one entry per id; b"" for special, added and padding tokens, which no grammar allows.
        eos_token_ids: ids that end a text; their own bytes, if any, are ignored.
        special_tokens: name -> id of the special tokens that structural tags may name; those that end a text are
            left out. No other grammar allows them.
    """

    token_bytes: Sequence[bytes]
    eos_token_ids: Sequence[int]
    special_tokens: Mapping[str, int] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        eos, size = tuple(sorted(set(self.eos_token_ids))), len(self.token_bytes)
        if not eos:
            raise ValueError("a vocabulary needs at least one EOS token id")
        if eos[0] < 0 or eos[-1] >= size:
            raise ValueError(f"EOS token ids {list(eos)} must lie in 0..{size - 1}")
        ends = set(eos)
        tokens = tuple(b"" if index in ends else bytes(token) for index, token in enumerate(self.token_bytes))
        specials = {name: index for name, index in self.special_tokens.items() if index not in ends}
        check_special_tokens(specials, tokens)
        known = {"token_bytes": tokens, "eos_token_ids": eos, "special_tokens": MappingProxyType(specials)}
        for name, value in known.items():
            object.__setattr__(self, name, value)

    @cached_property
    def eos_set(self) -> frozenset[int]:
        """The EOS ids as a set."""
        return frozenset(self.eos_token_ids)

    @cached_property
    def eos_mask(self) -> np.ndarray:
        """The row, int32 [num_words], that allows the EOS ids and nothing else."""
        mask = make_mask(self.eos_set, self.size)
        mask.flags.writeable = False
        return mask

    @property
    def size(self) -> int:
        """Number of ids, padding included."""
        return len(self.token_bytes)

    @property
    def num_words(self) -> int:
        """Number of int32 words of one bitmask row."""
        return (len(self.token_bytes) + 31) // 32


def check_special_tokens(special_tokens: Mapping[str, int], tokens: Sequence[bytes]) -> None:
    """Refuse a special token that is none, or is text at the same time."""
    for name, index in special_tokens.items():
        if not name or not 0 <= index < len(tokens):
            raise ValueError(f"special token {name!r} has id {index}; ids are 0..{len(tokens) - 1}, names not empty")
        if tokens[index]:
            raise ValueError(f"special token {name!r} also has the bytes {tokens[index]!r}; they must be b''")


def make_mask(token_ids: Collection[int], size: int) -> np.ndarray:
    """Return the bitmask row, int32 [ceil(size / 32)], that allows exactly `token_ids`."""
    row = np.zeros((size + 31) // 32, np.int32)
    ids = np.fromiter(token_ids, np.int64, len(token_ids))
    np.bitwise_or.at(row, ids >> 5, BITS[ids & 31])
    return row
