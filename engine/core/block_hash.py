"""Chained hashes of full blocks: equal hashes mean equal tokens from the start of the sequence on."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence


def hash_root(salt: str | None) -> bytes:
    """The parent of the first block: requests with different salts never share a block."""
    return hashlib.sha256(b"root" if salt is None else b"salt:" + salt.encode()).digest()


def extend_block_hashes(
    hashes: list[bytes], token_ids: Sequence[int], num_tokens: int, block_size: int, salt: str | None
) -> None:
    """Append the hash of every full block within the first `num_tokens` tokens that `hashes` lacks."""
    start = len(hashes)
    end = num_tokens // block_size
    if start >= end:
        return
    parent = hashes[-1] if hashes else hash_root(salt)
    data = array("q", token_ids[start * block_size : end * block_size]).tobytes()
    width = block_size * 8
    for offset in range(0, len(data), width):
        parent = hashlib.sha256(parent + data[offset : offset + width]).digest()
        hashes.append(parent)
