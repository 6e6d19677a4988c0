"""Cascade attention: the slow twin within a tolerance, and the plain kernels bit for bit."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.shared_prefixes import SharedPrefixes, make_shared
from kernels.triton.attention_plan import AttentionPlan
from kernels.triton.paged_attention import paged_attention
from tests.kernels import reference
from tests.kernels.triton.batches import TOLERANCE, Tensors, make_paged
from tests.kernels.triton.test_paged_attention import assert_same_sums, attend, make_table

pytestmark = pytest.mark.gpu

# Splits of 16 keys: contexts of 5 splits at most, so that all are cut alike.
LENS = [(1, 75), (1, 50), (1, 49), (1, 20), (1, 65), (1, 17), (1, 80)]
# Members, and keys that they share: not always whole splits, and never in the order of the batch.
GROUPS = [([4, 0, 6], 56), ([2, 1], 33)]


def make_cascade(
    device: torch.device,
    lens: list[tuple[int, int]] = LENS,
    groups: list[tuple[list[int], int]] = GROUPS,
    block_size: int = 16,
    **options: Any,
) -> tuple[Tensors, SharedPrefixes]:
    """A batch whose groups begin with the blocks of their leaders; the blocks they had before are full of NaN."""
    tensors = make_paged(lens, device, block_size=block_size, **options)
    _, k_cache, v_cache, tables = tensors[:4]
    for (leader, *others), shared_len in groups:
        num_blocks = shared_len // block_size
        for request in others:
            for cache in (k_cache, v_cache):
                cache[tables[request, :num_blocks].long()] = torch.nan
            tables[request, :num_blocks] = tables[leader, :num_blocks]
    whole = [(members, shared_len // block_size * block_size) for members, shared_len in groups]
    return tensors, make_shared(whole, len(lens) + 3, device)


def share(tensors: Tensors, shared: SharedPrefixes, target_programs: int = 1, **options: Any) -> Tensor:
    q = tensors[0]
    poisoned = torch.full(q.shape, torch.nan, dtype=q.dtype, device=q.device)
    options = {"scale": 0.3, "tiles": make_table(target_programs=target_programs, min_split=16)} | options
    plan = options.pop("plan", None) or AttentionPlan(tensors[4].diff().tolist(), tensors[5].tolist())
    return paged_attention(*tensors, **options, plan=plan.share(shared), out=poisoned)


def attend_plainly(tensors: Tensors, target_programs: int = 1, **options: Any) -> Tensor:
    return attend(tensors, make_table(target_programs=target_programs, min_split=16), **options)


def assert_equals_twins(tensors: Tensors, shared: SharedPrefixes, **options: Any) -> None:
    expected = reference.paged_attention(*tensors, **({"scale": 0.3} | options))
    assert not expected.isnan().any()
    tolerance = TOLERANCE[expected.dtype]
    actual = share(tensors, shared, **options)
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(actual, attend_plainly(tensors, **options)), "not the same bits"


@pytest.mark.parametrize(("head_dim", "dtype"), [(16, torch.float32), (60, torch.float16)])
def test_shared_keys_equal_the_twins(device: torch.device, head_dim: int, dtype: torch.dtype) -> None:
    heads = {"num_heads": 4, "num_kv_heads": 2}
    assert_equals_twins(*make_cascade(device, head_dim=head_dim, dtype=dtype, **heads))


@pytest.mark.parametrize("group_size", [1, 3])
def test_any_number_of_heads_in_a_group(device: torch.device, group_size: int) -> None:
    assert_equals_twins(*make_cascade(device, num_heads=group_size, head_dim=16))


@pytest.mark.parametrize("block_size", [3, 32])
def test_any_block_size(device: torch.device, block_size: int) -> None:
    assert_equals_twins(*make_cascade(device, block_size=block_size, head_dim=16))


@pytest.mark.parametrize("options", [{"soft_cap": 1.5}, {"sliding_window": 70}], ids=str)
def test_soft_caps_and_windows(device: torch.device, options: dict[str, Any]) -> None:
    """Under a window members see different keys, and nothing is shared."""
    assert_equals_twins(*make_cascade(device, head_dim=16), **options)


def test_sinks_are_counted_once(device: torch.device) -> None:
    tensors, shared = make_cascade(device, num_heads=4, num_kv_heads=2, head_dim=16)
    sinks = torch.tensor([-1.0, 0.0, 2.5, 4.0], device=device)
    expected = attend_plainly(tensors, sinks=sinks)
    assert torch.equal(share(tensors, shared, sinks=sinks), expected)
    assert not torch.equal(expected, attend_plainly(tensors))


@pytest.mark.parametrize("target_programs", [1, 40])
def test_who_computes_a_part_changes_no_bit(device: torch.device, target_programs: int) -> None:
    tensors, shared = make_cascade(device, head_dim=16)
    assert_same_sums(share(tensors, shared, target_programs), attend_plainly(tensors))


def test_more_members_than_a_tile_has_room_for(device: torch.device) -> None:
    lens = [(1, 40 + request) for request in range(19)]
    tensors, shared = make_cascade(device, lens, [(list(range(19)), 32)], head_dim=16)
    assert torch.equal(share(tensors, shared), attend_plainly(tensors))


def test_a_member_that_is_cut_elsewhere_attends_alone(device: torch.device) -> None:
    """Above 16 splits of 16 keys a context is cut into longer parts; its sums stay those it has alone."""
    tensors, shared = make_cascade(device, [(1, 65), (1, 260), (1, 70)], [([0, 1, 2], 64)], head_dim=16)
    assert_equals_twins(tensors, shared)


def test_prefill_and_drafts_beside_the_members_are_left_alone(device: torch.device) -> None:
    lens = [(20, 45), (1, 75), (3, 40), (1, 65)]
    assert_equals_twins(*make_cascade(device, lens, [([1, 3], 64)], head_dim=16))


def test_nothing_shared_is_the_plain_path(device: torch.device) -> None:
    tensors, _ = make_cascade(device, groups=[], head_dim=16)
    assert torch.equal(share(tensors, make_shared([], 7, device)), attend_plainly(tensors))


def test_groups_of_the_next_step_are_read_from_the_same_tensors(device: torch.device) -> None:
    """As in a recorded step: one plan of upper bounds and one set of tensors, with new contents each time."""
    tensors, shared = make_cascade(device, head_dim=16)
    plan = AttentionPlan([1] * 7, [100] * 7)
    first = share(tensors, shared, plan=plan)
    shared.packed.copy_(make_shared([([0, 4], 48)], 10, device).packed)
    assert torch.equal(share(tensors, shared, plan=plan), first)
    shared.packed.copy_(make_shared([], 10, device).packed)
    assert torch.equal(share(tensors, shared, plan=plan), first)


def test_the_shared_keys_are_read_through_the_leader(device: torch.device) -> None:
    """Shows that the pass over shared keys is what computes them: others' own entries are not looked at."""
    tensors, shared = make_cascade(device, head_dim=16)
    expected = share(tensors, shared)
    tensors[3][6, :3] = 0  # blocks of whole splits; block 0 is full of NaN
    assert torch.equal(share(tensors, shared), expected)


def test_an_fp8_cache_is_shared_too(device: torch.device) -> None:
    (q, k_cache, v_cache, *rest), shared = make_cascade(device, head_dim=16)
    eighth = (q, k_cache.to(torch.float8_e4m3fn), v_cache.to(torch.float8_e4m3fn), *rest)
    assert torch.equal(share(eighth, shared), attend_plainly(eighth))


def test_groups_for_fewer_requests_are_refused(device: torch.device) -> None:
    tensors, _ = make_cascade(device, head_dim=16)
    with pytest.raises(ValueError, match="shared must have room for 7 requests, not 4"):
        share(tensors, make_shared([([0, 1], 32)], 4, device))
