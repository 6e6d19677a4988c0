"""Torch's and native attention against the reference: decode, chunks, prefill and mixes over NaN-filled pages."""

import dataclasses
import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.cpu.native_ops import NativeOps
from kernels.ops import StepShape
from kernels.torch import make_ops
from kernels.torch.attention import paged_attention
from tests.kernels import reference
from tests.kernels.cpu.conftest import ARCHITECTURES, require_library
from tests.kernels.paged import PagedBatch, make_batch, spoil_hidden_keys, to_pieces

DECODE = [(1, 1), (1, 63), (1, 64), (1, 65), (1, 200)]
MIXED = [(1, 40), (63, 63), (1, 100), (5, 33), (20, 100), (1, 1), (5, 5), (17, 17), (70, 170)]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@functools.cache
def make_native(architecture: str = "native") -> NativeOps:
    return NativeOps(require_library(architecture), num_threads=2)


def attend(name: str, batch: PagedBatch, **options: Any) -> Tensor:
    """Attend with torch's ops, or with native ones for an architecture."""
    if name == "torch":
        return paged_attention(*batch.tensors, scale=0.3, **options, plan=batch.plan)
    return make_native(name).paged_attention(*to_pieces(batch).tensors, scale=0.3, **options)


def assert_equals_reference(batch: PagedBatch, name: str = "torch", **options: Any) -> None:
    expected = reference.paged_attention(*batch.tensors, scale=0.3, **options)
    assert not expected.isnan().any()
    tolerance = TOLERANCE[batch.q.dtype]
    torch.testing.assert_close(attend(name, batch, **options), expected, atol=tolerance, rtol=tolerance)


@pytest.fixture(params=["torch", *ARCHITECTURES])
def name(request: pytest.FixtureRequest) -> str:
    """Torch, or what native ops are compiled for."""
    if request.param != "torch":
        require_library(request.param)
    return request.param


@pytest.mark.parametrize("lens", [DECODE, MIXED, [(63, 63)], [(100, 163)], [(4, 4), (4, 70), (4, 31)]])
@pytest.mark.parametrize(("head_dim", "dtype"), [(2, torch.float32), (60, torch.bfloat16), (128, torch.float32)])
def test_equals_the_reference(name: str, lens: list[tuple[int, int]], head_dim: int, dtype: torch.dtype) -> None:
    assert_equals_reference(make_batch(lens, head_dim=head_dim, dtype=dtype), name)


def test_float16_accumulates_in_float32() -> None:
    assert_equals_reference(make_batch(MIXED, dtype=torch.float16))


@pytest.mark.parametrize(("group_size", "dtype"), [(1, torch.bfloat16), (3, torch.float32), (8, torch.bfloat16)])
def test_heads_of_a_group_share_their_key_head(name: str, group_size: int, dtype: torch.dtype) -> None:
    batch = make_batch(MIXED, num_heads=3 * group_size, num_kv_heads=3, head_dim=16, dtype=dtype)
    assert_equals_reference(batch, name)


@pytest.mark.parametrize("window", [1, 16, 30, 65, 1000])
def test_sliding_window_hides_older_keys(name: str, window: int) -> None:
    assert_equals_reference(make_batch(MIXED, head_dim=16), name, sliding_window=window)


@pytest.mark.parametrize("window", [1, 16, 30, 65])
def test_memory_behind_the_window_may_hold_anything(name: str, window: int) -> None:
    """Its blocks may belong to another request by now."""
    batch = make_batch(MIXED, head_dim=16)
    spoil_hidden_keys(batch.tensors, window)
    assert_equals_reference(batch, name, sliding_window=window)


@pytest.mark.parametrize("soft_cap", [1.5, 50.0])
@pytest.mark.parametrize("lens", [DECODE, MIXED])
def test_soft_cap_bounds_the_scores(name: str, lens: list[tuple[int, int]], soft_cap: float) -> None:
    assert_equals_reference(make_batch(lens, head_dim=16), name, soft_cap=soft_cap)


@pytest.mark.parametrize(
    ("options", "dtype"),
    [({}, torch.float32), ({"sliding_window": 30}, torch.bfloat16), ({"soft_cap": 1.5}, torch.float32)],
)
def test_sinks_take_a_share_of_each_head(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    batch = make_batch([*MIXED, (4, 4), (4, 70)], num_heads=6, num_kv_heads=2, head_dim=16, dtype=dtype)
    sinks = torch.tensor([-100.0, -1.0, 0.0, 2.5, 4.0, 100.0])
    assert_equals_reference(batch, name, sinks=sinks, **options)


@pytest.mark.parametrize("block_size", [1, 3, 16, 32, 100])
def test_any_block_size(name: str, block_size: int) -> None:
    assert_equals_reference(make_batch(MIXED, head_dim=8, block_size=block_size), name)


@pytest.mark.parametrize(("lens", "window"), [([(300, 700)], None), ([(600, 600)], 100), ([(300, 400)], 290)])
def test_long_prompts_are_attended_in_pieces(lens: list[tuple[int, int]], window: int | None) -> None:
    batch = make_batch([*lens, (1, 20)], num_heads=2, num_kv_heads=1, head_dim=8)
    assert_equals_reference(batch, sliding_window=window)


def test_lengths_are_read_from_the_tensors_without_a_plan() -> None:
    batch = make_batch(MIXED)
    expected = reference.paged_attention(*batch.tensors, scale=0.3)
    actual = paged_attention(*batch.tensors, scale=0.3)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_queries_may_be_a_view_of_a_fused_projection(name: str) -> None:
    batch = make_batch(MIXED)
    fused = torch.randn(batch.q.shape[0], 8, 64)
    fused[:, :4] = batch.q
    view = dataclasses.replace(batch, q=fused[:, :4])
    torch.testing.assert_close(attend(name, view), attend(name, batch), atol=2e-6, rtol=0)


def test_contexts_of_similar_length_are_padded_together() -> None:
    """One long context among short ones must not pad them all: padding at most doubles a context."""
    batch = make_batch([(1, 10)] * 20 + [(1, 900)], num_heads=2, num_kv_heads=1, head_dim=8)
    parts = batch.plan.list_parts(None, batch.k_cache, batch.q)
    assert sum(part.slots.numel() for part in parts) == 20 * 10 + 900
    assert_equals_reference(batch)


@pytest.mark.parametrize("num_mates", [1, 3, 30])
def test_padding_contributes_nothing(num_mates: int) -> None:
    """Up to the order of sums, which torch's products choose by their shape and the processor."""
    batches = (make_batch([(1, 48), *[(1, 90)] * number]) for number in (0, num_mates))
    alone, padded = (paged_attention(*batch.tensors, scale=0.3)[:1] for batch in batches)
    torch.testing.assert_close(padded, alone, atol=2e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_poison_in_one_request_stays_there(name: str, dtype: torch.dtype) -> None:
    """A request whose own keys are NaN gets NaN; the others, padded beside it, do not."""
    batch = make_batch([(1, 50), (1, 64), (20, 64)], dtype=dtype)
    batch.k_cache[batch.block_tables[1].long()] = torch.nan
    batch.v_cache[batch.block_tables[1].long()] = torch.nan
    out = attend(name, batch)
    assert out[1].isnan().all()
    assert not out[[0, *range(2, 22)]].isnan().any()


def test_layers_with_and_without_window_share_one_plan() -> None:
    batch = make_batch(MIXED)
    for window in (None, 20, None, 20):
        assert_equals_reference(batch, sliding_window=window)


@pytest.mark.parametrize("name", ["torch", "native"])
@settings(max_examples=30, deadline=None)
@given(
    lens=st.lists(st.tuples(st.sampled_from([1, 1, 2, 3, 16, 17, 40]), st.integers(0, 150)), min_size=1, max_size=7),
    block_size=st.integers(1, 20),
    window=st.none() | st.integers(1, 140),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_any_batch_equals_the_reference(
    name: str, lens: list[tuple[int, int]], block_size: int, window: int | None, dtype: torch.dtype
) -> None:
    pairs = [(query_len, query_len + num_cached) for query_len, num_cached in lens]
    batch = make_batch(pairs, num_heads=2, num_kv_heads=1, head_dim=4, block_size=block_size, dtype=dtype)
    assert_equals_reference(batch, name, sliding_window=window)


@pytest.mark.parametrize("lens", [MIXED, [(1, 700)] * 40, [(16, 300)] * 9, [(1000, 3000), (1, 10)]])
def test_what_is_gathered_was_estimated(lens: list[tuple[int, int]]) -> None:
    batch = make_batch(lens)
    estimate = make_ops().estimate_scratch
    assert estimate is not None
    lengths = [seq_len for _, seq_len in lens]
    parts = batch.plan.list_parts(None, batch.k_cache, batch.q)
    gathered = 2 * max(part.slots.numel() for part in parts) * batch.k_cache.stride(1) * 4
    shape = StepShape(len(lens), len(batch.q), max(lengths), sum(lengths), 4, 2, 64, 256, 512, 4)
    assert gathered <= estimate(shape) <= 4 * gathered + 2**25
