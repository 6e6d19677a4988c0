"""Keys and values stored in float8: what is written, and attention over it."""

import pytest
import torch

from kernels import torch as torch_ops
from kernels.torch.elementwise import FP8, store_kv, take_slots
from tests.kernels import reference
from tests.kernels.paged import make_batch

LENS = [(1, 40), (63, 63), (1, 100), (5, 33), (20, 100)]


def test_values_are_rounded_and_clamped() -> None:
    k = torch.tensor([1.0, -3.3, 500.0, -1e9]).view(1, 1, 4)
    caches = [torch.zeros(2, 2, 1, 4).to(FP8) for _ in range(2)]
    store_kv(k, -k, caches[0], caches[1], torch.tensor([3]))
    assert caches[0][1, 1, 0].float().tolist() == [1.0, -3.25, 448.0, -448.0]
    assert caches[1][1, 1, 0].float().tolist() == [-1.0, 3.25, -448.0, 448.0]
    assert not caches[0][0].float().any()


@pytest.mark.parametrize("window", [None, 20])
def test_attention_equals_the_reference_over_the_rounded_cache(window: int | None) -> None:
    batch = make_batch(LENS, head_dim=16)
    k_cache, v_cache = (cache.nan_to_num().to(FP8) for cache in (batch.k_cache, batch.v_cache))
    ops = torch_ops.make_ops()
    rest = (batch.block_tables, batch.query_start_loc, batch.seq_lens)
    query_lens, seq_lens = [pair[0] for pair in LENS], [pair[1] for pair in LENS]
    plan = ops.make_plan(*rest, query_lens, seq_lens, 16)
    actual = ops.paged_attention(batch.q, k_cache, v_cache, *rest, scale=0.3, sliding_window=window, plan=plan)
    expected = reference.paged_attention(
        batch.q, k_cache.float(), v_cache.float(), *rest, scale=0.3, sliding_window=window
    )
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_slots_come_back_as_they_were_stored() -> None:
    cache = torch.randn(6, 2, 4).to(FP8)
    taken = take_slots(cache, torch.tensor([5, 0, 5]))
    assert taken.dtype == FP8
    assert torch.equal(taken.float(), cache.float()[[5, 0, 5]])
