"""Names of blocks: chained hashes within a process, and the fingerprint that stands beside them elsewhere."""

from dataclasses import replace
from typing import Any

import pytest

from engine.core.block_hash import compute_fingerprint, extend_block_hashes, make_extra_key
from engine.resolved_config import CacheConfig
from tests.engine.core.harness import make_group

BLOCK = 4
CACHE = CacheConfig(100, 16, True, (make_group(),), 64)
NAMES: dict[str, Any] = {
    "weights_hash": b"w", "model": "m", "dtype": "float32", "quantization": "none", "kv_dtype": "float32",
    "cache": CACHE,
}  # fmt: skip


def test_different_extra_keys_give_different_hashes() -> None:
    """Keys of another kind, divided differently, in another order, or absent."""
    a, b, ab = (make_extra_key("salt", value) for value in (b"a", b"b", b"ab"))
    found = set()
    for keys in ((), (a,), (b,), (ab,), (a, b), (b, a), (a + b,), (make_extra_key("adapter", b"a"),), (b"",)):
        hashes: list[bytes] = []
        extend_block_hashes(hashes, [1, 2, 3, 4], 4, BLOCK, keys)
        found.add(hashes[0])
    assert len(found) == 9


def test_hashes_are_the_same_whether_extended_at_once_or_bit_by_bit() -> None:
    tokens = list(range(30))
    at_once: list[bytes] = []
    extend_block_hashes(at_once, tokens, 30, BLOCK, (b"a",))
    bit_by_bit: list[bytes] = []
    for num_tokens in range(31):
        extend_block_hashes(bit_by_bit, tokens, num_tokens, BLOCK, (b"a",))
    assert bit_by_bit == at_once
    assert len(set(at_once)) == 7


@pytest.mark.parametrize(
    "change",
    [
        {"weights_hash": b"v"}, {"model": "n"}, {"dtype": "bfloat16"}, {"quantization": "int8"}, {"kv_dtype": "fp8"},
        {"model": "mf", "dtype": "loat32"}, {"cache": replace(CACHE, block_size=8)},
        {"cache": replace(CACHE, groups=(make_group(64),))},
    ],
    ids=str,
)  # fmt: skip
def test_whatever_decides_the_bytes_of_a_block_changes_the_fingerprint(change: dict[str, Any]) -> None:
    assert compute_fingerprint(**(NAMES | change)) != compute_fingerprint(**NAMES)


def test_the_size_of_the_cache_does_not_change_the_fingerprint() -> None:
    larger = replace(CACHE, num_blocks=200, enable_prefix_caching=False)
    assert compute_fingerprint(**(NAMES | {"cache": larger})) == compute_fingerprint(**NAMES)
