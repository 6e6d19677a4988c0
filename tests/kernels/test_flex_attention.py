"""Attention through flex_attention against the slow twin. On CPU it is not compiled; the mask is the same."""

from __future__ import annotations

import pytest
import torch

from kernels import reference, torch_ops
from tests.kernels.paged import make_batch

MIXED = [(1, 40), (63, 63), (1, 100), (5, 33), (20, 100), (1, 1), (5, 5), (17, 17)]
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")


@pytest.mark.parametrize(
    ("lens", "window", "soft_cap"),
    [([(1, 1)], None, None), (MIXED, None, None), (MIXED, 16, None), (MIXED, None, 1.5), (MIXED, 30, 2.0)],
)
def test_equals_the_reference(
    lens: list[tuple[int, int]], window: int | None, soft_cap: float | None
) -> None:
    batch = make_batch(lens, head_dim=16)
    ops = torch_ops.make_ops("flex")
    query_lens, seq_lens = [pair[0] for pair in lens], [pair[1] for pair in lens]
    plan = ops.make_plan(batch.block_tables, batch.query_start_loc, batch.seq_lens, query_lens, seq_lens, 16)
    options = {"scale": 0.3, "sliding_window": window, "soft_cap": soft_cap}
    actual = ops.paged_attention(*batch.tensors, **options, plan=plan)  # type: ignore[arg-type]
    assert actual.is_contiguous()
    expected = reference.paged_attention(*batch.tensors, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
