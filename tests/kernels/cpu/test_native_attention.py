"""Native attention against its slow twin, and against itself: alone, in a batch, in chunks, on more threads."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import reference
from kernels.cpu.native_ops import NativeOps
from tests.kernels.cpu.conftest import require_library
from tests.kernels.paged import PagedBatch, make_batch

DECODE = [(1, 1), (1, 63), (1, 64), (1, 65), (1, 200)]
MIXED = [(1, 40), (63, 63), (1, 100), (5, 33), (20, 100), (1, 1), (5, 5), (17, 17), (70, 170)]
# scores and weights of bfloat16 are rounded to 8 bits once each
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def assert_equals_reference(
    ops: NativeOps, batch: PagedBatch, window: int | None = None, soft_cap: float | None = None
) -> None:
    expected = reference.paged_attention(*batch.tensors, scale=0.3, sliding_window=window, soft_cap=soft_cap)
    actual = ops.paged_attention(*batch.tensors, scale=0.3, sliding_window=window, soft_cap=soft_cap)
    assert not expected.isnan().any()
    tolerance = TOLERANCE[batch.q.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("head_dim", [2, 60, 64, 128])
@pytest.mark.parametrize("lens", [DECODE, MIXED])
def test_equals_the_reference(
    ops: NativeOps, lens: list[tuple[int, int]], head_dim: int, dtype: torch.dtype
) -> None:
    assert_equals_reference(ops, make_batch(lens, head_dim=head_dim, dtype=dtype))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("group_size", range(1, 9))
def test_heads_of_a_group_share_their_key_head(
    native: NativeOps, group_size: int, dtype: torch.dtype
) -> None:
    batch = make_batch(MIXED, num_heads=3 * group_size, num_kv_heads=3, head_dim=16, dtype=dtype)
    assert_equals_reference(native, batch)


def test_a_group_may_be_larger_than_a_piece_of_work(native: NativeOps) -> None:
    assert_equals_reference(native, make_batch(MIXED[:5], num_heads=50, num_kv_heads=1, head_dim=16))


@pytest.mark.parametrize("window", [1, 2, 16, 30, 64, 65, 1000])
def test_sliding_window_hides_older_keys(ops: NativeOps, window: int) -> None:
    assert_equals_reference(ops, make_batch(MIXED, head_dim=16), window=window)


@pytest.mark.parametrize("soft_cap", [1.5, 50.0])
def test_soft_cap_bounds_the_scores(ops: NativeOps, soft_cap: float) -> None:
    assert_equals_reference(ops, make_batch(MIXED, head_dim=16), soft_cap=soft_cap)


@pytest.mark.parametrize("block_size", [1, 3, 16, 100])
def test_any_block_size(native: NativeOps, block_size: int) -> None:
    assert_equals_reference(native, make_batch(MIXED, head_dim=8, block_size=block_size))


@settings(max_examples=60, deadline=None)
@given(
    lens=st.lists(
        st.tuples(st.sampled_from([1, 1, 2, 3, 16, 17, 40]), st.integers(0, 150)), min_size=1, max_size=7
    ),
    block_size=st.integers(1, 20),
    window=st.none() | st.integers(1, 140),
    dtype=st.sampled_from(list(TOLERANCE)),
)
def test_any_batch_equals_the_reference(
    lens: list[tuple[int, int]], block_size: int, window: int | None, dtype: torch.dtype
) -> None:
    native = NativeOps(require_library(), num_threads=2)
    pairs = [(query_len, query_len + num_cached) for query_len, num_cached in lens]
    batch = make_batch(pairs, num_heads=2, num_kv_heads=1, head_dim=4, block_size=block_size, dtype=dtype)
    assert_equals_reference(native, batch, window)


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("chunks", [[1] * 200, [13] * 15 + [5], [150, 50], [64, 64, 64, 8]])
def test_a_prompt_in_chunks_gives_the_same_bits(
    ops: NativeOps, chunks: list[int], dtype: torch.dtype, window: int | None
) -> None:
    """Decode, verification and chunks of any length are the same computation, row by row."""
    options = {"scale": 0.3, "sliding_window": window}
    whole = make_batch([(200, 200)], dtype=dtype, head_dim=60)
    expected = ops.paged_attention(*whole.tensors, **options)
    parts = []
    for end, length in zip(itertools.accumulate(chunks), chunks, strict=True):
        q = whole.q[end - length : end]
        starts, lens = torch.tensor([0, length]).int(), torch.tensor([end]).int()
        caches = (whole.k_cache, whole.v_cache, whole.block_tables)
        parts.append(ops.paged_attention(q, *caches, starts, lens, **options))
    assert torch.equal(torch.cat(parts), expected)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_request_in_a_batch_gives_the_bits_it_gives_alone(ops: NativeOps, dtype: torch.dtype) -> None:
    batch = make_batch(MIXED, dtype=dtype)
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


@pytest.mark.parametrize("num_threads", [1, 3, 8])
def test_the_number_of_threads_does_not_matter(native: NativeOps, num_threads: int) -> None:
    batch = make_batch(MIXED)
    other = NativeOps(require_library(), num_threads)
    expected = native.paged_attention(*batch.tensors, scale=0.3)
    assert torch.equal(other.paged_attention(*batch.tensors, scale=0.3), expected)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_poison_in_one_request_stays_there(ops: NativeOps, dtype: torch.dtype) -> None:
    batch = make_batch([(1, 50), (1, 64), (20, 64)], dtype=dtype)
    batch.k_cache[batch.block_tables[1].long()] = torch.nan
    batch.v_cache[batch.block_tables[1].long()] = torch.nan
    out = ops.paged_attention(*batch.tensors, scale=0.3)
    assert out[1].isnan().all()
    assert not out[[0, *range(2, 22)]].isnan().any()


def test_blocks_that_left_the_window_are_not_read(ops: NativeOps) -> None:
    """Their block table entries point to the null block, which holds anything."""
    batch = make_batch([(3, 200)], block_size=16)
    expected = ops.paged_attention(*batch.tensors, scale=0.3, sliding_window=40)
    batch.block_tables[0, : (200 - 3 + 1 - 40) // 16] = 0
    assert torch.equal(ops.paged_attention(*batch.tensors, scale=0.3, sliding_window=40), expected)


def test_queries_may_be_a_view_of_a_fused_projection(native: NativeOps) -> None:
    batch = make_batch(MIXED)
    fused = torch.randn(batch.q.shape[0], 8, 64)
    fused[:, :4] = batch.q
    expected = native.paged_attention(*batch.tensors, scale=0.3)
    assert torch.equal(native.paged_attention(fused[:, :4], *batch.tensors[1:], scale=0.3), expected)


def test_block_tables_may_be_the_corner_of_a_larger_table(native: NativeOps) -> None:
    batch = make_batch(MIXED)
    rows, columns = batch.block_tables.shape
    large = torch.full((rows + 2, columns + 5), -1, dtype=torch.int32)
    large[:rows, :columns] = batch.block_tables
    expected = native.paged_attention(*batch.tensors, scale=0.3)
    tensors = (*batch.tensors[:3], large[:rows, :columns], *batch.tensors[4:])
    assert torch.equal(native.paged_attention(*tensors, scale=0.3), expected)
