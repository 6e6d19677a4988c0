"""Chained hashes of full blocks: equal hashes mean equal tokens and equal extra keys from the start of the sequence on.

An extra key is anything beside the tokens that decides what a block holds or who may read it, such as a cache salt.
Hashes say nothing about the model: outside this process a block is named by its hash and `compute_fingerprint`.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from engine.config import CacheConfig

# Changes with the order of a layer's keys and values in memory: [block, slot, KV head, element], keys and values apart.
_KV_LAYOUT = b"1"


def make_extra_key(kind: str, value: bytes) -> bytes:
    """Return an extra key; keys of different kinds are never equal.

    Args:
        kind: a word without ":", such as "salt".
    """
    return kind.encode() + b":" + value


def extend_block_hashes(
    hashes: list[bytes],
    token_ids: Sequence[int],
    num_tokens: int,
    block_size: int,
    extra_keys: tuple[bytes, ...],
) -> None:
    """Append the hash of every full block within the first `num_tokens` tokens that `hashes` lacks."""
    start = len(hashes)
    end = num_tokens // block_size
    if start >= end:
        return
    parent = hashes[-1] if hashes else _hash_parts(extra_keys)
    data = array("q", token_ids[start * block_size : end * block_size]).tobytes()
    width = block_size * 8
    for offset in range(0, len(data), width):
        parent = hashlib.sha256(parent + data[offset : offset + width]).digest()
        hashes.append(parent)


def compute_fingerprint(
    weights_hash: bytes, model: str, dtype: str, quantization: str, kv_dtype: str, cache: CacheConfig
) -> str:
    """Return the name of everything beside block hashes that decides the bytes of a block.

    It stands beside the hashes wherever blocks leave the process: engines with equal fingerprints may exchange them.

    Args:
        weights_hash: of the weights as loaded.
        model: the model's arithmetic: all of its config that influences a result.
        dtype, quantization, kv_dtype: of the computation, of the weights and of the cache.
        cache: its layers and block size count, its number of blocks does not.
    """
    settings = (model, dtype, quantization, kv_dtype, repr(cache.groups), str(cache.block_size))
    return _hash_parts([_KV_LAYOUT, weights_hash, *(each.encode() for each in settings)]).hex()


def _hash_parts(parts: Sequence[bytes]) -> bytes:
    """Hash a list of byte strings, each behind its length, so that no two lists look the same."""
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).digest()
