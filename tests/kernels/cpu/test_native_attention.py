"""Native attention gives the same bits alone, in a batch, in chunks, and on any number of threads."""

import itertools
from typing import Any

import pytest
import torch

from kernels.cpu.native_ops import NativeOps
from kernels.cpu.pieces import turn_into_pieces
from tests.kernels import reference
from tests.kernels.cpu.conftest import require_library
from tests.kernels.paged import make_batch, to_int8, to_pieces

DTYPES = [torch.float32, torch.bfloat16]
MIXED = [(1, 40), (63, 63), (1, 100), (5, 33), (20, 100), (1, 1), (5, 5), (17, 17), (70, 170)]


def test_a_group_may_be_larger_than_a_piece_of_work(native: NativeOps) -> None:
    batch = make_batch(MIXED[:5], num_heads=50, num_kv_heads=1, head_dim=16)
    expected = reference.paged_attention(*batch.tensors, scale=0.3)
    actual = native.paged_attention(*to_pieces(batch).tensors, scale=0.3)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("block_size", "head_dim"), [(16, 576), (32, 34), (16, 20), (8, 60), (2, 20), (1, 34)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_cache_holds_keys_that_are_the_values_too(
    ops: NativeOps, dtype: torch.dtype, block_size: int, head_dim: int
) -> None:
    batch = make_batch(MIXED[:6], 20, 1, head_dim, block_size, dtype)
    q, keys, _, tables, *lengths = batch.tensors
    expected = reference.paged_attention(q, keys, keys, tables, *lengths, scale=0.1)
    slots = (~keys[:, :, 0, 0].isnan()).flatten().nonzero().flatten()
    cache = torch.full_like(keys, torch.nan)
    ops.store_kv(*(keys.flatten(0, 1)[slots],) * 2, cache, cache, slots)
    turned = keys.clone()
    turn_into_pieces(turned, turned)
    assert torch.equal(cache.nan_to_num(), turned.nan_to_num())
    actual = ops.paged_attention(q, cache, cache, tables, *lengths, scale=0.1)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(actual.float(), expected.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("is_int8", "window"), [(False, 70), (True, None)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunks", [[1] * 200, [13] * 15 + [5], [150, 50], [64, 64, 64, 8]])
def test_a_prompt_in_chunks_gives_the_same_bits(
    ops: NativeOps, chunks: list[int], dtype: torch.dtype, is_int8: bool, window: int | None
) -> None:
    """Decode, verification and chunks of any length are the same computation, row by row."""
    whole = make_batch([(200, 200)], dtype=dtype, head_dim=60)
    whole = to_int8(whole, ops) if is_int8 else to_pieces(whole)
    sinks = torch.linspace(-1, 3, whole.q.shape[1])
    options: dict[str, Any] = {"scale": 0.3, "sliding_window": window, "soft_cap": 2.0, "sinks": sinks}
    expected = ops.paged_attention(*whole.tensors, **options)
    parts = []
    for end, length in zip(itertools.accumulate(chunks), chunks, strict=True):
        q = whole.q[end - length : end]
        starts, lens = torch.tensor([0, length]).int(), torch.tensor([end]).int()
        caches = (whole.k_cache, whole.v_cache, whole.block_tables)
        parts.append(ops.paged_attention(q, *caches, starts, lens, **options))
    assert torch.equal(torch.cat(parts), expected)


@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_request_in_a_batch_gives_the_bits_it_gives_alone(
    ops: NativeOps, dtype: torch.dtype, is_int8: bool
) -> None:
    batch = make_batch(MIXED, dtype=dtype)
    batch = to_int8(batch, ops) if is_int8 else to_pieces(batch)
    together = ops.paged_attention(*batch.tensors, scale=0.3)
    bounds = batch.query_start_loc.tolist()
    for request, (query_len, _) in enumerate(MIXED):
        rows = slice(bounds[request], bounds[request + 1])
        alone = ops.paged_attention(
            batch.q[rows],
            batch.k_cache,
            batch.v_cache,
            batch.block_tables[request : request + 1],
            torch.tensor([0, query_len]).int(),
            batch.seq_lens[request : request + 1],
            scale=0.3,
        )
        assert torch.equal(alone, together[rows])


@pytest.mark.parametrize(("is_int8", "window"), [(False, None), (True, 1000)])
@pytest.mark.parametrize("lens", [MIXED, [(1, 5000)], [(3, 1500), (1, 600)], [(9, 2100)] * 3])
def test_the_number_of_threads_does_not_matter(
    native: NativeOps, lens: list[tuple[int, int]], is_int8: bool, window: int | None
) -> None:
    """With few requests, several threads share the context of each."""
    plain = make_batch(lens, head_dim=16)
    batch = to_int8(plain, native) if is_int8 else to_pieces(plain)
    sinks = torch.linspace(-1, 3, plain.q.shape[1])
    options: dict[str, Any] = {"scale": 0.3, "sliding_window": window, "sinks": sinks}
    expected = native.paged_attention(*batch.tensors, **options)
    tolerance = 0.04 if is_int8 else 1e-5
    torch.testing.assert_close(expected, reference.paged_attention(*plain.tensors, **options), atol=tolerance, rtol=0)
    for num_threads in (1, 3, 8):
        other = NativeOps(require_library(), num_threads)
        assert torch.equal(other.paged_attention(*batch.tensors, **options), expected)


def test_blocks_that_left_the_window_are_not_read(ops: NativeOps) -> None:
    """Their block table entries point to the null block, which holds anything."""
    batch = to_pieces(make_batch([(3, 200)], block_size=16))
    expected = ops.paged_attention(*batch.tensors, scale=0.3, sliding_window=40)
    batch.block_tables[0, : (200 - 3 + 1 - 40) // 16] = 0
    assert torch.equal(ops.paged_attention(*batch.tensors, scale=0.3, sliding_window=40), expected)


def test_block_tables_may_be_the_corner_of_a_larger_table(native: NativeOps) -> None:
    batch = to_pieces(make_batch(MIXED))
    rows, columns = batch.block_tables.shape
    large = torch.full((rows + 2, columns + 5), -1, dtype=torch.int32)
    large[:rows, :columns] = batch.block_tables
    expected = native.paged_attention(*batch.tensors, scale=0.3)
    tensors = (*batch.tensors[:3], large[:rows, :columns], *batch.tensors[4:])
    assert torch.equal(native.paged_attention(*tensors, scale=0.3), expected)
