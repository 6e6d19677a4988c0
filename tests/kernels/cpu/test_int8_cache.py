"""Keys and values in int8: each is within half a step, and attention adds no error of its own that would count."""

from typing import Any

import pytest
import torch

from kernels.cpu.native_ops import NativeOps
from tests.kernels import reference
from tests.kernels.paged import PagedBatch, make_batch, to_int8

MIXED = [(1, 40), (63, 63), (1, 100), (5, 33), (20, 100), (1, 1), (70, 170)]
SHAPES = {"one head": (1, 1, 16), "odd groups": (9, 3, 64), "rest": (4, 4, 100), "wide": (8, 2, 256)}


def owned_slots(batch: PagedBatch) -> torch.Tensor:
    return (~batch.k_cache[:, :, 0, 0].isnan()).flatten()


@pytest.mark.parametrize("block_size", [16, 48])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stored_numbers_are_within_half_a_step_and_alone(ops: NativeOps, dtype: torch.dtype, block_size: int) -> None:
    batch = make_batch(MIXED, dtype=dtype, head_dim=60, block_size=block_size)
    stored = to_int8(batch, ops)
    owned = owned_slots(batch)
    caches = reference.read_int8_cache(stored.k_cache, stored.v_cache, 60)
    for cache, source in zip(caches, (batch.k_cache, batch.v_cache), strict=True):
        numbers, expected = cache.flatten(0, 1), source.flatten(0, 1).float()
        assert numbers[~owned].isnan().all()
        step = expected[owned].abs().amax(-1, keepdim=True) / 127
        assert ((numbers[owned] - expected[owned]).abs() <= step * 0.5001).all()


@pytest.mark.parametrize(("shape", "window"), [*zip(SHAPES, (None, 30) * 2, strict=True)])
def test_attention_is_that_over_the_stored_numbers(ops: NativeOps, shape: str, window: int | None) -> None:
    num_heads, num_kv_heads, head_dim = SHAPES[shape]
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    batch = make_batch(MIXED, **sizes)
    stored = to_int8(batch, ops)
    sinks = torch.linspace(-1, 3, num_heads)
    options: dict[str, Any] = {"scale": head_dim**-0.5, "sliding_window": window, "soft_cap": 5.0, "sinks": sinks}
    actual = ops.paged_attention(*stored.tensors, **options)
    caches = reference.read_int8_cache(stored.k_cache, stored.v_cache, head_dim)
    expected = reference.paged_attention(batch.q, *caches, *batch.tensors[3:], **options)
    torch.testing.assert_close(actual, expected, atol=3e-4, rtol=0)
    exact = reference.paged_attention(*batch.tensors, **options)
    torch.testing.assert_close(actual, exact, atol=0.04, rtol=0)


def test_a_write_keeps_the_bits_of_the_slots_beside_it(native: NativeOps) -> None:
    batch = make_batch([(1, 40)])
    stored = to_int8(batch, native)
    before = reference.read_int8_cache(stored.k_cache, stored.v_cache, 64)
    block = int(batch.block_tables[0, 1])
    new = torch.full((1, 2, 64), 9.0)
    native.store_kv(new, -new, stored.k_cache, stored.v_cache, torch.tensor([block * 16 + 5]))
    after = reference.read_int8_cache(stored.k_cache, stored.v_cache, 64)
    for cache, number in zip(after, (9.0, -9.0), strict=True):
        assert torch.equal(cache[block, 5], torch.full((2, 64), number))
    for old, cache in zip(before, after, strict=True):
        old[block, 5] = cache[block, 5] = 0
        assert torch.equal(old.nan_to_num(7), cache.nan_to_num(7))


@pytest.mark.parametrize("is_key", [True, False])
def test_a_nan_spoils_the_rows_that_see_it_and_no_others(native: NativeOps, is_key: bool) -> None:
    batch = make_batch([(4, 100), (1, 50)])
    place = (int(batch.block_tables[0, 98 // 16]), 98 % 16)
    stored = to_int8(batch, native)
    key, value = batch.k_cache[place][None].clone(), batch.v_cache[place][None].clone()
    (key if is_key else value)[:] = torch.nan
    slot = torch.tensor([place[0] * 16 + place[1]])
    native.store_kv(key, value, stored.k_cache, stored.v_cache, slot)
    out = native.paged_attention(*stored.tensors, scale=0.1)
    assert out[2:4].isnan().all()  # positions 98 and 99
    assert out[4].isfinite().all()


@pytest.mark.parametrize(
    ("head_dim", "block_size", "message"), [(62, 16, "multiple of 4"), (64, 24, "multiple of 16")]
)
def test_a_layout_that_does_not_fit_is_refused(
    native: NativeOps, head_dim: int, block_size: int, message: str
) -> None:
    batch = make_batch([(1, 20)], head_dim=head_dim, block_size=block_size)
    with pytest.raises(AssertionError, match=message):
        to_int8(batch, native)
