"""Tokens of a tiktoken rank file (base64 of the bytes, then the rank, one a line), and a plain encoder for them."""

from __future__ import annotations

import base64
import re
from functools import lru_cache
from pathlib import Path

# Close to the published tokenizer's split: words with the character before them, up to three digits, the rest.
_PIECE = re.compile(
    r"'(?:[sdmt]|ll|ve|re)|[^\r\n\w]?[^\W\d_]+|\d{1,3}| ?(?:[^\s\w]|_)+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class TokenRanks:
    """A byte pair vocabulary. One padding-free id space: the ranks, then one token that ends a text."""

    def __init__(self, path: Path) -> None:
        ranks: dict[bytes, int] = {}
        for line in path.read_bytes().splitlines():
            token, rank = line.split()
            ranks[base64.b64decode(token)] = int(rank)
        self.ranks = ranks
        self.token_bytes = sorted(ranks, key=ranks.__getitem__)
        self.eos_token_id = len(self.token_bytes)
        self._encode_piece = lru_cache(maxsize=65536)(self._merge)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        return [token_id for piece in _PIECE.findall(text) for token_id in self._encode_piece(piece)]

    def _merge(self, piece: str) -> tuple[int, ...]:
        """Merge the pair of lowest rank until no pair is left."""
        data = piece.encode()
        if data in self.ranks:
            return (self.ranks[data],)
        parts = [data[index : index + 1] for index in range(len(data))]
        last = len(self.ranks)
        while len(parts) > 1:
            found = [self.ranks.get(parts[i] + parts[i + 1], last) for i in range(len(parts) - 1)]
            best = min(found)
            if best == last:
                break
            index = found.index(best)
            parts[index : index + 2] = [parts[index] + parts[index + 1]]
        return tuple(self.ranks[part] for part in parts)
