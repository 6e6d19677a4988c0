"""Experts against their slow twin, and against themselves in other company."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.ops import GatedActivation, Routing
from kernels.scaled import round_float8
from kernels.torch.routing import choose_experts as choose_expected
from kernels.triton.experts import LOADS, choose_rows, pack_experts, run_experts, unpack_experts
from kernels.triton.routing import choose_experts, group_pairs
from tests.kernels import reference
from tests.kernels.experts import CLAMPED, make_experts, make_routes, move
from tests.kernels.triton.batches import TOLERANCE

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts", "hidden_size", "inner_size", "activation", "has_bias", "dtype"),
    [
        (1, 1, 1, 8, 4, GatedActivation(), False, torch.float32),
        (7, 2, 5, 63, 100, CLAMPED, True, torch.float16),
        (40, 4, 9, 131, 64, GatedActivation(), False, torch.float32),
    ],
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
    actual = run_experts(x, ids, weights, pack_experts(move(experts, device), None, device=device))
    tolerance = 4 * TOLERANCE[dtype]
    torch.testing.assert_close(actual.cpu(), expected, atol=tolerance, rtol=tolerance)


def test_a_token_does_not_depend_on_the_tokens_beside_it(device: torch.device) -> None:
    experts = pack_experts(move(make_experts(4, 40, 24), device), None, device=device)
    x, ids, weights = (each.to(device) for each in make_routes(50, 40, 4, 2))
    together = run_experts(x, ids, weights, experts)
    for rows in (slice(0, 1), slice(3, 10)):
        assert torch.equal(run_experts(x[rows], ids[rows], weights[rows], experts), together[rows])


@pytest.mark.parametrize("num_tokens", [1, 8, 400])
def test_every_pair_is_in_one_tile_of_its_expert(device: torch.device, num_tokens: int) -> None:
    """400 tokens are more pairs than a program sorts at once."""
    _, ids, _ = make_routes(num_tokens, 4, 6, 3)
    rows = choose_rows(ids.numel(), 6)
    grouping = group_pairs(ids.to(device), 6, rows)
    ends, pairs = grouping.segment_ends.tolist(), grouping.pairs.tolist()
    found = []
    for expert, start in zip(grouping.tile_experts.tolist(), grouping.tile_starts.tolist(), strict=True):
        if expert >= 0:
            own = pairs[start : min(start + rows, ends[expert])]
            assert own and all(ids.flatten()[pair] == expert for pair in own)
            found += own
    assert sorted(found) == list(range(ids.numel()))


def test_prompts_have_higher_tiles_with_the_same_bits(device: torch.device) -> None:
    experts = pack_experts(move(make_experts(2, 40, 24), device), None, device=device)
    x, ids, weights = (each.to(device) for each in make_routes(70, 40, 2, 2))
    assert choose_rows(ids.numel(), 2) == LOADS[0][0] > choose_rows(12, 2)
    few = run_experts(x[:6], ids[:6], weights[:6], experts)
    assert torch.equal(run_experts(x, ids, weights, experts)[:6], few)


@pytest.mark.parametrize(
    ("score", "num_groups", "has_bias"),
    [("softmax", 1, False), ("softmax", 4, False), ("sigmoid", 4, True), ("topk_softmax", 1, False)],
)
def test_routes_equal_those_of_torch(device: torch.device, score: Any, num_groups: int, has_bias: bool) -> None:
    routing = Routing(5, score, score == "sigmoid", 1.5, num_groups, 2)
    generator = torch.Generator().manual_seed(0)
    logits, bias = torch.randn(9, 52, generator=generator), torch.randn(52, generator=generator)
    expected = choose_expected(logits, routing, bias if has_bias else None)
    found = choose_experts(logits.to(device), routing, bias.to(device) if has_bias else None)
    assert torch.equal(found[0].cpu(), expected[0])
    torch.testing.assert_close(found[1].cpu(), expected[1], atol=1e-6, rtol=1e-5)


def test_scores_that_are_no_numbers_choose_existing_experts(device: torch.device) -> None:
    ids, _ = choose_experts(torch.full((2, 5), torch.nan, device=device), Routing(3), None)
    assert all(sorted(row) == sorted(set(row)) and max(row) < 5 for row in ids.tolist())


@pytest.mark.parametrize("quantization", ["int4", "int6", "int8"])
def test_coded_experts_equal_the_numbers_of_their_codes(device: torch.device, quantization: Any) -> None:
    experts = make_experts(3, 63, 100, torch.float16, CLAMPED, has_bias=True)
    packed = pack_experts(move(experts, device), quantization, device=device)
    routes = make_routes(9, 63, 3, 2, torch.float16)
    rounded = unpack_experts(packed)
    numbers = replace(rounded, gate_up=rounded.gate_up.cpu().half(), down=rounded.down.cpu().half())
    expected = reference.run_experts(*routes, replace(numbers, **{
        name: getattr(experts, name) for name in ("gate_up_bias", "down_bias")
    }))
    found = run_experts(*(each.to(device) for each in routes), packed)
    tolerance = 4 * TOLERANCE[torch.float16]
    torch.testing.assert_close(found.cpu(), expected, atol=tolerance, rtol=tolerance)


def test_experts_in_float8_multiply_inputs_of_float8(device: torch.device) -> None:
    """A tile of few rows and one of many, against dense products with each expert's rounded matrices."""
    experts = make_experts(3, 130, 100, torch.float32, GatedActivation())
    packed = pack_experts(move(experts, device), "fp8", device=device, has_fp8=True)
    numbers = unpack_experts(packed)
    for num_tokens in (9, 90):
        x, ids, weights = make_routes(num_tokens, 130, 3, 2, torch.float32)
        expected = torch.zeros(num_tokens, 130)
        for expert in range(3):
            gate, up = (round_float8(x).dequantize() @ numbers.gate_up[expert].cpu().t()).chunk(2, dim=1)
            inner = round_float8(torch.nn.functional.silu(gate) * up).dequantize()
            share = weights.where(ids == expert, 0.0).sum(dim=1, keepdim=True)
            expected += share * (inner @ numbers.down[expert].cpu().t())
        found = run_experts(x.to(device), ids.to(device), weights.to(device), packed)
        torch.testing.assert_close(found.cpu(), expected, atol=2e-3, rtol=2e-2)
