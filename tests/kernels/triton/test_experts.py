"""Experts against their slow twin, and against themselves in other company."""

import pytest
import torch

from kernels.ops import GatedActivation
from kernels.triton.experts import BLOCK_ROWS, group_pairs, pack_experts, run_experts
from tests.kernels import reference
from tests.kernels.experts import CLAMPED, make_experts, make_routes, move
from tests.kernels.triton.batches import TOLERANCE

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("activation", "has_bias", "dtype"),
    [(GatedActivation(), False, torch.float32), (CLAMPED, True, torch.float16)],
)
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts", "hidden_size", "inner_size"),
    [(1, 1, 1, 8, 4), (7, 2, 5, 63, 100), (40, 4, 9, 131, 64)],
)
def test_experts_equal_the_reference(
    device: torch.device,
    num_tokens: int,
    top_k: int,
    num_experts: int,
    hidden_size: int,
    inner_size: int,
    activation: GatedActivation,
    has_bias: bool,
    dtype: torch.dtype,
) -> None:
    experts = make_experts(num_experts, hidden_size, inner_size, dtype, activation, has_bias)
    routes = make_routes(num_tokens, hidden_size, num_experts, top_k, dtype)
    expected = reference.run_experts(*routes, experts)
    x, ids, weights = (each.to(device) for each in routes)
    actual = run_experts(x, ids, weights, move(experts, device))
    tolerance = 4 * TOLERANCE[dtype]
    torch.testing.assert_close(actual.cpu(), expected, atol=tolerance, rtol=tolerance)


def test_a_token_does_not_depend_on_the_tokens_beside_it(device: torch.device) -> None:
    experts = move(make_experts(4, 40, 24), device)
    x, ids, weights = (each.to(device) for each in make_routes(50, 40, 4, 2))
    together = run_experts(x, ids, weights, experts)
    for rows in (slice(0, 1), slice(3, 10)):
        assert torch.equal(run_experts(x[rows], ids[rows], weights[rows], experts), together[rows])


@pytest.mark.parametrize("num_tokens", [1, 8, 100])
def test_every_pair_is_in_one_tile_of_its_expert(device: torch.device, num_tokens: int) -> None:
    _, ids, _ = make_routes(num_tokens, 4, 6, 3)
    grouping = group_pairs(ids.to(device), 6)
    ends, pairs = grouping.segment_ends.tolist(), grouping.pairs.tolist()
    found = []
    for expert, start in zip(grouping.tile_experts.tolist(), grouping.tile_starts.tolist(), strict=True):
        if expert >= 0:
            rows = pairs[start : min(start + BLOCK_ROWS, ends[expert])]
            assert rows and all(ids.flatten()[pair] == expert for pair in rows)
            found += rows
    assert sorted(found) == list(range(ids.numel()))


def test_quantized_experts_are_refused() -> None:
    with pytest.raises(ValueError, match="quantization='int8' of experts is not available in the triton ops"):
        pack_experts(make_experts(2, 8, 4), "int8")
