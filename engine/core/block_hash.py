"""Chained hashes of full blocks: equal hashes mean equal tokens and extra keys from the start of the sequence.

Extra keys are inputs other than tokens that determine a block's content or who may read it, such as a cache salt.
Hashes do not cover the model: outside this process a block is identified by its hash and `compute_fingerprint`.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence

from engine.messages import AdapterRef, ImagePart
from engine.resolved_config import CacheConfig

# Version of a layer's memory layout: [block, slot, KV head, element], keys and values in separate tensors.
_KV_LAYOUT = b"1"
_HASH_SIZE = hashlib.sha256().digest_size
_NO_KEYS = hashlib.sha256().digest()  # of a request without extra keys


def make_extra_key(kind: str, value: bytes) -> bytes:
    """Return an extra key; keys of different kinds are never equal.

    Args:
        kind: name without ":", such as "salt".
    """
    return kind.encode() + b":" + value


def list_extra_keys(salt: str | None, adapter: AdapterRef | None) -> tuple[bytes, ...]:
    keys = []
    if salt is not None:
        keys.append(make_extra_key("salt", salt.encode()))
    if adapter is not None:
        keys.append(make_extra_key("adapter", adapter.digest.encode()))
    return tuple(keys)


def list_image_keys(images: Sequence[ImagePart], block_size: int) -> dict[int, bytes]:
    """Return the extra keys of single blocks: each image in the block and where it starts; by index of the block."""
    keys: dict[int, bytes] = {}
    for image in images:
        first = int(image.places[0])
        for block in dict.fromkeys((image.places // block_size).tolist()):
            start = (first - block * block_size).to_bytes(8, "little", signed=True)
            keys[block] = keys.get(block, b"") + image.digest + start
    return keys


def extend_block_hashes(
    hashes: list[bytes], token_ids: Sequence[int], num_tokens: int, block_size: int,
    extra_keys: tuple[bytes, ...], image_keys: Mapping[int, bytes] | None = None,
) -> None:
    """Append the missing hashes of the full blocks within the first `num_tokens` tokens.

    Args:
        extra_keys: those of all blocks.
        image_keys: those of single blocks, see `list_image_keys`.
    """
    start = len(hashes)
    end = num_tokens // block_size
    if start >= end:
        return
    parent = hashes[-1] if hashes else _hash_parts(extra_keys) if extra_keys else _NO_KEYS
    data = array("q", token_ids[start * block_size : end * block_size]).tobytes()
    width = block_size * 8
    for offset in range(0, len(data), width):
        content = parent + data[offset : offset + width]
        if image_keys:
            content += image_keys.get(len(hashes), b"")
        parent = hashlib.sha256(content).digest()
        hashes.append(parent)


def list_keys(hashes: list[bytes], group: int) -> list[bytes]:
    """Return the keys of these blocks in the prefix cache: in the first group their hashes, else longer ones."""
    return [block_hash + bytes((group,)) for block_hash in hashes] if group else hashes


def list_state_keys(block_hash: bytes, num_parts: int) -> list[bytes]:
    """Return the keys of the parts of the state after a block. Stores place a key by its first bytes."""
    return [part.to_bytes(2, "little") + block_hash + b"s" for part in range(num_parts)]


def is_state_key(key: bytes) -> bool:
    return len(key) == _HASH_SIZE + 3


def is_block_hash(key: bytes) -> bool:
    """Whether a key of the prefix cache belongs to the first group."""
    return len(key) == _HASH_SIZE


def compute_fingerprint(
    weights_hash: bytes, model: str, dtype: str, quantization: str, kv_dtype: str, cache: CacheConfig
) -> str:
    """Return a hash of everything that determines a block's bytes, except its tokens and extra keys.

    Engines with equal fingerprints may exchange blocks.

    Args:
        weights_hash: hash of the loaded weights.
        model: the part of the model's config that influences results.
        dtype, quantization, kv_dtype: of the computation, the weights and the cache.
        cache: layer groups and block size are used, the number of blocks is not.
    """
    settings = (model, dtype, quantization, kv_dtype, repr(cache.groups), str(cache.block_size))
    return _hash_parts([_KV_LAYOUT, weights_hash, *(each.encode() for each in settings)]).hex()


def _hash_parts(parts: Sequence[bytes]) -> bytes:
    """Hash byte strings, each prefixed by its length, so that different lists never collide."""
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).digest()
