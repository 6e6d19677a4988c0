"""The tokens a grammar is applied to, as bytes."""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from .bitmask import BITS


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """Token bytes in id order, and the ids that end a text.

    Args:
        token_bytes: one entry per id; b"" for special, added and padding tokens, which no grammar allows.
        eos_token_ids: ids that end a text; their own bytes, if any, are ignored.
        special_tokens: name -> id of the special tokens that structural tags may name; those that end a text are
            left out. No other grammar allows them.
    """

    token_bytes: tuple[bytes, ...]
    eos_token_ids: tuple[int, ...]
    special_tokens: Mapping[str, int] = field(repr=False)
    hash: str = field(init=False)
    eos_set: frozenset[int] = field(init=False, repr=False)
    # [num_words] int32: the row that allows the EOS ids and nothing else.
    eos_mask: np.ndarray = field(init=False, repr=False)

    def __init__(
        self, token_bytes: Sequence[bytes], eos_token_ids: Sequence[int],
        special_tokens: Mapping[str, int] | None = None,
    ) -> None:
        eos = tuple(sorted(set(eos_token_ids)))
        if not eos:
            raise ValueError("a vocabulary needs at least one EOS token id")
        if eos[0] < 0 or eos[-1] >= len(token_bytes):
            raise ValueError(f"EOS token ids {list(eos)} must lie in 0..{len(token_bytes) - 1}")
        ends = set(eos)
        tokens = tuple(b"" if index in ends else bytes(token) for index, token in enumerate(token_bytes))
        specials = {name: index for name, index in (special_tokens or {}).items() if index not in ends}
        check_special_tokens(specials, tokens)
        mask = make_mask(eos, len(tokens))
        mask.flags.writeable = False
        for name, value in (
            ("token_bytes", tokens), ("eos_token_ids", eos), ("eos_mask", mask), ("eos_set", frozenset(eos)),
        ):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "special_tokens", MappingProxyType(specials))
        object.__setattr__(self, "hash", compute_hash(tokens, eos, specials))

    @property
    def size(self) -> int:
        """Number of ids, padding included."""
        return len(self.token_bytes)

    @property
    def num_words(self) -> int:
        """Number of int32 words of one bitmask row."""
        return (len(self.token_bytes) + 31) // 32

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and self.hash == other.hash

    def __hash__(self) -> int:
        return hash(self.hash)


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


def compute_hash(tokens: tuple[bytes, ...], eos_token_ids: tuple[int, ...], special_tokens: Mapping[str, int]) -> str:
    """Hash the tokens with their lengths, so that no two vocabularies share a byte stream."""
    digest = hashlib.sha256(repr((len(tokens), eos_token_ids, sorted(special_tokens.items()))).encode())
    for token in tokens:
        digest.update(len(token).to_bytes(4, "little"))
        digest.update(token)
    return digest.hexdigest()
