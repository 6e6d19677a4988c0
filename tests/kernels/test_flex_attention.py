"""Attention through flex_attention against the slow twin. On CPU it is not compiled; the mask is the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import reference, torch_ops
from kernels.flex_attention import FlexPlan
from tests.kernels.paged import make_batch, spoil_hidden_keys

MIXED = [(1, 40), (63, 63), (1, 100), (5, 33), (20, 100), (1, 1), (5, 5), (17, 17)]
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")


@pytest.mark.parametrize(
    ("lens", "window", "soft_cap", "has_sinks"),
    [
        ([(1, 1)], None, None, False),
        (MIXED, None, None, True),
        (MIXED, 16, None, False),
        (MIXED, None, 1.5, False),
        (MIXED, 30, 2.0, True),
    ],
)
def test_equals_the_reference(
    lens: list[tuple[int, int]], window: int | None, soft_cap: float | None, has_sinks: bool
) -> None:
    batch = make_batch(lens, head_dim=16)
    if window is not None:
        spoil_hidden_keys(batch.tensors, window)
    ops = torch_ops.make_ops("flex")
    query_lens, seq_lens = [pair[0] for pair in lens], [pair[1] for pair in lens]
    plan = ops.make_plan(batch.block_tables, batch.query_start_loc, batch.seq_lens, query_lens, seq_lens, 16)
    sinks = torch.linspace(-1, 3, batch.q.shape[1]) if has_sinks else None
    options = {"scale": 0.3, "sliding_window": window, "soft_cap": soft_cap, "sinks": sinks}
    actual = ops.paged_attention(*batch.tensors, **options, plan=plan)  # type: ignore[arg-type]
    assert actual.is_contiguous()
    expected = reference.paged_attention(*batch.tensors, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def make_flex_plan(lens: list[tuple[int, int]]) -> FlexPlan:
    query_lens, seq_lens = [list(each) for each in zip(*lens, strict=True)]
    return FlexPlan(torch.zeros(len(lens), 300, dtype=torch.int32), query_lens, seq_lens, 16)


@pytest.mark.parametrize("window", [None, 1, 100, 257])
@pytest.mark.parametrize(
    "lens",
    [
        [(1, 1)],
        MIXED,
        [(300, 700)],
        [(256, 256), (1, 128)],
        [(100, 129), (28, 600), (1, 127), (384, 513)],
        [(1, 500)] * 130,
    ],
)
def test_blocks_from_lengths_are_those_of_the_whole_mask(
    lens: list[tuple[int, int]], window: int | None
) -> None:
    mask = make_flex_plan(lens).mask(window)
    num_queries, num_keys = sum(each for each, _ in lens), sum(each for _, each in lens)
    expected = create_block_mask(mask.mask_mod, None, None, num_queries, num_keys, device="cpu")
    assert (mask.shape, mask.BLOCK_SIZE) == (expected.shape, expected.BLOCK_SIZE)
    for name in ("kv_num_blocks", "kv_indices", "q_num_blocks", "q_indices"):
        for part in (name, f"full_{name}"):
            torch.testing.assert_close(getattr(mask, part), getattr(expected, part), atol=0, rtol=0)


class LargestTensor(TorchDispatchMode):
    """Notes the elements of the largest tensor that anything returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.numel = max(self.numel, result.numel())
        return result


def test_a_mask_has_no_element_for_every_query_and_key() -> None:
    lens = [(200, 4000), (1, 2000), (1, 2000)]
    with LargestTensor() as largest:
        make_flex_plan(lens).mask(None)
    assert 0 < largest.numel <= 8000
