"""Triton attention against the slow twin: decode, drafts, chunks, prefill, over NaN in all memory of others."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.triton.attention_plan import AttentionPlan
from kernels.triton.paged_attention import paged_attention
from kernels.triton.tiles import Tile, Tiles, choose_tiles
from tests.kernels import reference
from tests.kernels.paged import spoil_hidden_keys
from tests.kernels.triton.batches import TOLERANCE, make_paged

pytestmark = pytest.mark.gpu

DECODE = [(1, 1), (1, 15), (1, 16), (1, 17), (1, 40)]
MIXED = [(1, 40), (33, 33), (1, 20), (5, 37), (20, 41), (1, 1), (17, 17)]
# A few requests of each kind: decodes, one of them in several parts, drafts and a chunk.
FEW = [(1, 1), (1, 40), (1, 100), (5, 37), (20, 41)]


def make_tiles(block_n: int = 16, min_split: int = 32, target_programs: int = 1, rows: int = 16) -> Tiles:
    """Small tiles, so that small batches have many of them."""
    tile = Tile(rows, block_n, 4, 2)
    return Tiles(tile, tile, min_split, target_programs)


def attend(tensors: tuple[Tensor, ...], tiles: Tiles | None = None, **options: Any) -> Tensor:
    q = tensors[0]
    poisoned = torch.full(q.shape, torch.nan, dtype=q.dtype, device=q.device)
    options = {"scale": 0.3} | options
    out = paged_attention(*tensors, **options, tiles=tiles or make_tiles(), out=poisoned)  # type: ignore[arg-type]
    assert out is poisoned
    return out


def assert_equals_reference(tensors: tuple[Tensor, ...], tiles: Tiles | None = None, **options: Any) -> None:
    expected = reference.paged_attention(*tensors, **({"scale": 0.3} | options))  # type: ignore[arg-type]
    assert not expected.isnan().any()
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(attend(tensors, tiles, **options), expected, atol=tolerance, rtol=tolerance)


def assert_same_sums(actual: Tensor, expected: Tensor) -> None:
    """Equal bits where kernels that differ in their parts are interpreted; a GPU may fuse a product and a sum."""
    tolerance = 0.0 if actual.device.type == "cpu" else 1e-6
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("head_dim", "dtype"), [(60, torch.float16), (64, torch.float32)])
def test_mixed_batches_equal_the_reference(device: torch.device, head_dim: int, dtype: torch.dtype) -> None:
    heads = {"num_heads": 4, "num_kv_heads": 2}
    assert_equals_reference(make_paged(MIXED, device, head_dim=head_dim, dtype=dtype, **heads))


@pytest.mark.parametrize("block_size", [1, 3, 32])
def test_any_block_size(device: torch.device, block_size: int) -> None:
    assert_equals_reference(make_paged(DECODE, device, head_dim=16, block_size=block_size))


@pytest.mark.parametrize("group_size", [1, 3, 8])
def test_heads_of_a_group_share_their_key_head(device: torch.device, group_size: int) -> None:
    lens = [(1, 17), (3, 18), (19, 33)]
    assert_equals_reference(make_paged(lens, device, num_heads=group_size, head_dim=16))


def test_wide_heads_over_keys_that_are_the_values(device: torch.device) -> None:
    q, keys, _, *rest = make_paged(FEW, device, num_heads=20, num_kv_heads=1, head_dim=288)
    assert_equals_reference((q, keys, keys, *rest), choose_tiles(4, 288), scale=0.05)


@pytest.mark.parametrize("window", [1, 30])
def test_sliding_window_hides_older_keys(device: torch.device, window: int) -> None:
    assert_equals_reference(make_paged(MIXED, device, head_dim=16), sliding_window=window)


@pytest.mark.parametrize("window", [1, 70])
def test_memory_behind_the_window_may_hold_anything(device: torch.device, window: int) -> None:
    """Its blocks may belong to another request by now."""
    tensors = make_paged([(1, 200), (5, 90), (40, 130)], device, head_dim=16)
    spoil_hidden_keys(tensors, window)
    assert_equals_reference(tensors, make_tiles(block_n=32), sliding_window=window)


@pytest.mark.parametrize("target_programs", [1, pytest.param(1000, marks=pytest.mark.soak)])
def test_soft_cap_bounds_the_scores(device: torch.device, target_programs: int) -> None:
    tiles = make_tiles(target_programs=target_programs)
    assert_equals_reference(make_paged(FEW, device, head_dim=16), tiles, soft_cap=1.5)


def test_sinks_take_a_share_of_each_head(device: torch.device) -> None:
    tensors = make_paged([(1, 1), (1, 90), (5, 37)], device, num_heads=6, num_kv_heads=2, head_dim=16)
    sinks = torch.tensor([-100.0, -1.0, 0.0, 2.5, 4.0, 100.0], device=device)
    assert_equals_reference(tensors, make_tiles(target_programs=40), sinks=sinks)


@pytest.mark.parametrize(
    ("target_programs", "window"), [(1, 70), pytest.param(40, None, marks=pytest.mark.soak), (1000, 70)]
)
def test_long_contexts_are_split(device: torch.device, target_programs: int, window: int | None) -> None:
    tensors = make_paged([(1, 200), (4, 97), (1, 31), (1, 33)], device, head_dim=16)
    assert_equals_reference(tensors, make_tiles(target_programs=target_programs), sliding_window=window)


def test_who_computes_a_split_changes_no_bit(device: torch.device) -> None:
    tensors = make_paged([(1, 200), (4, 97), (1, 31)], device, head_dim=16)
    results = [attend(tensors, make_tiles(target_programs=target)) for target in (1, 30)]
    for each in results[1:]:
        assert_same_sums(each, results[0])


def test_drafts_between_decodes_and_prompts_have_parts_of_their_own(device: torch.device) -> None:
    lens = [(1, 35), (18, 18), (3, 40), (1, 20), (16, 33)]
    tensors = make_paged(lens, device, head_dim=16)
    assert_equals_reference(tensors, make_tiles(target_programs=1000, min_split=16))


def test_drafts_with_too_many_parts_are_folded_at_once(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = make_paged([(3, 40), (2, 20)], device, head_dim=16)
    tiles = make_tiles(target_programs=1000, min_split=16)
    plans = [AttentionPlan([3, 2], [40, 20]) for _ in range(2)]
    expected = attend(tensors, tiles, plan=plans[0])
    monkeypatch.setitem(paged_attention.__globals__, "MAX_DRAFT_BYTES", 0)
    assert_same_sums(attend(tensors, tiles, plan=plans[1]), expected)
    sizes = [plan.take_scratch(0, 16, device)[0].untyped_storage().nbytes() for plan in plans]
    assert sizes == [5 * 2 * 3 * 18 * 4, 0], "tokens, heads, splits, sums of 16 and their statistics"


def test_a_row_does_not_depend_on_the_rows_beside_it(device: torch.device) -> None:
    q, k_cache, v_cache, tables, _, seq_lens = make_paged([(1, 130), (1, 9), (1, 77)], device, head_dim=16)
    tiles = make_tiles(target_programs=1000)
    together = attend((q, k_cache, v_cache, tables, torch.arange(4, device=device).int(), seq_lens), tiles)
    starts = torch.arange(2, device=device).int()
    for row in range(3):
        part = slice(row, row + 1)
        alone = attend((q[part], k_cache, v_cache, tables[part], starts, seq_lens[part]), tiles)
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("target_programs", [1, 1000])
def test_a_recorded_plan_serves_runs_of_any_length_up_to_its_own(device: torch.device, target_programs: int) -> None:
    """Tokens and rows that pad follow those of the step; a row that pads has no tokens."""
    q, k_cache, v_cache, tables, starts, seq_lens = make_paged([(1, 50), (3, 90), (1, 9), (2, 33)], device)
    tiles = make_tiles(target_programs=target_programs)
    expected = attend((q, k_cache, v_cache, tables, starts, seq_lens), tiles)
    padded = (
        torch.cat((q, q.new_zeros(5, *q.shape[1:]))), k_cache, v_cache,
        torch.cat((tables, tables.new_zeros(2, tables.shape[1]))), torch.cat((starts, starts[-1:].expand(2))),
        torch.cat((seq_lens, seq_lens.new_ones(2))),
    )
    out = attend(padded, tiles, plan=AttentionPlan([2] * 6, [128] * 6, max_query_len=4))
    assert torch.equal(out[: len(q)], expected)


def test_a_plan_of_upper_bounds_gives_the_same_result(device: torch.device) -> None:
    tensors = make_paged([(1, 50), (1, 9)], device, head_dim=16)
    tiles = make_tiles(target_programs=1000)
    bounds = attend(tensors, tiles, plan=AttentionPlan([1, 1], [1000, 1000]))
    torch.testing.assert_close(bounds, attend(tensors, tiles), atol=0, rtol=0)


def test_queries_may_be_a_view_of_a_fused_projection(device: torch.device) -> None:
    q, *rest = make_paged(DECODE, device, head_dim=16)
    fused = torch.randn(q.shape[0], 8, 16, device=device)
    fused[:, :2] = q
    assert torch.equal(attend((fused[:, :2], *rest)), attend((q, *rest)))


def test_prefill_tiles_with_unmasked_parts_equal_the_reference(device: torch.device) -> None:
    tiles = make_tiles(block_n=16, rows=64)
    tensors = make_paged([(40, 140), (90, 90), (1, 30)], device, head_dim=16)
    assert_equals_reference(tensors, tiles)


def test_fp8_keys_and_values_are_decoded_exactly(device: torch.device) -> None:
    q, k_cache, v_cache, *rest = make_paged(MIXED, device, head_dim=16)
    k8, v8 = k_cache.to(torch.float8_e4m3fn), v_cache.to(torch.float8_e4m3fn)
    expected = reference.paged_attention(q, k8.float(), v8.float(), *rest, scale=0.3)
    torch.testing.assert_close(attend((q, k8, v8, *rest)), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: (t[0].double(), *t[1:]), "q must be"),
        (lambda t: (t[0], t[1].half(), *t[2:]), "k_cache must be"),
        (lambda t: (t[0], t[1].transpose(0, 1), *t[2:]), "contiguous"),
        (lambda t: (t[0][..., :3].contiguous(), *t[1:]), "does not fit"),
        (lambda t: (*t[:4], t[4][:-1], t[5]), "query_start_loc"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(device: torch.device, change: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        paged_attention(*change(make_paged(DECODE, device, head_dim=16)), scale=1.0)


def test_windows_below_one_are_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="sliding_window must be at least 1, not 0"):
        paged_attention(*make_paged(DECODE, device, head_dim=16), scale=1.0, sliding_window=0)
