"""Native and torch's experts against the slow twin, and native ones against themselves in other company."""

import pytest
import torch
from torch import Tensor

from kernels import torch as torch_ops
from kernels.cpu.native_ops import NativeOps
from kernels.ops import ExpertWeights, GatedActivation, Ops, Quantization
from tests.kernels import reference
from tests.kernels.cpu.conftest import require_library
from tests.kernels.experts import CLAMPED, make_experts, make_routes

# Values between the products are rounded; sums of four results have a size of about 2.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 0.1}
# (experts, top k, hidden size, inner size): less than a panel, odd sizes, an odd number of panels
SHAPES = [(1, 1, 8, 4), (5, 2, 63, 100), (16, 4, 131, 96)]
KINDS = ["float32", "half", "bfloat16", "int8", "int4-bfloat16"]


@pytest.fixture
def ops(product_ops: NativeOps) -> NativeOps:
    return product_ops


def make_kind(kind: str, shape: tuple[int, int, int, int]) -> tuple[ExpertWeights, Quantization | None, torch.dtype]:
    num_experts, _, hidden_size, inner_size = shape
    dtype = torch.bfloat16 if kind.endswith("bfloat16") else torch.float32
    drawn_dtype = torch.float32 if kind in ("float32", "int8") else torch.bfloat16
    drawn = make_experts(num_experts, hidden_size, inner_size, drawn_dtype, CLAMPED, has_bias=True)
    experts = ExpertWeights(
        drawn.gate_up.to(dtype), drawn.gate_up_bias, drawn.down.to(dtype), drawn.down_bias, drawn.activation
    )
    quantizations: dict[str, Quantization] = {"int8": "int8", "int4": "int4"}
    return experts, quantizations.get(kind[:4]), dtype


def run(ops: Ops, experts: ExpertWeights, routes: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    return ops.run_experts(*routes, ops.pack_experts(experts, None))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("activation", "has_bias"), [(GatedActivation(), True), (CLAMPED, False)])
@pytest.mark.parametrize("shape", SHAPES)
def test_experts_equal_their_slow_twin(
    ops: NativeOps,
    shape: tuple[int, int, int, int],
    activation: GatedActivation,
    has_bias: bool,
    dtype: torch.dtype,
) -> None:
    num_experts, top_k, hidden_size, inner_size = shape
    experts = make_experts(num_experts, hidden_size, inner_size, dtype, activation, has_bias)
    for num_tokens in (1, 7, 40):
        routes = make_routes(num_tokens, hidden_size, num_experts, top_k, dtype)
        expected = reference.run_experts(*routes, experts)
        for each in (ops.make_ops(), torch_ops.make_ops()):
            actual = run(each, experts, routes)
            torch.testing.assert_close(actual, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("kind", ["int8", "int4-bfloat16"])
def test_quantized_experts_equal_single_products(ops: NativeOps, kind: str) -> None:
    experts, quantization, dtype = make_kind(kind, SHAPES[2])
    experts = ExpertWeights(experts.gate_up, None, experts.down, None, GatedActivation())
    x, _, _ = make_routes(1, 131, 16, 4, dtype)
    actual = ops.make_ops().run_experts(
        x, torch.tensor([[3]]), torch.ones(1, 1), ops.make_ops().pack_experts(experts, quantization)
    )
    inner = ops.silu_mul(ops.linear(x, ops.pack_linear(experts.gate_up[3], None, quantization), None, torch.float32))
    inner = inner.to(dtype)
    fine: Quantization | None = "int6" if quantization == "int4" else quantization
    expected = ops.linear(inner, ops.pack_linear(experts.down[3], None, fine), None)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_does_not_depend_on_the_tokens_beside_it(ops: NativeOps, kind: str) -> None:
    """530 tokens are run in two parts."""
    shape = (8, 3, 67, 40)
    experts, quantization, dtype = make_kind(kind, shape)
    packed = ops.make_ops().pack_experts(experts, quantization)
    routes = make_routes(530, 67, 8, 3, dtype)
    together = ops.make_ops().run_experts(*routes, packed)
    for rows in (slice(0, 1), slice(3, 10), slice(505, 530)):
        x, ids, weights = (each[rows] for each in routes)
        part = ops.make_ops().run_experts(x, ids, weights, packed)
        assert torch.equal(part, together[rows])


@pytest.mark.parametrize("kind", KINDS)
def test_the_number_of_threads_does_not_matter(native: NativeOps, kind: str) -> None:
    experts, quantization, dtype = make_kind(kind, SHAPES[1])
    routes = make_routes(20, 63, 5, 2, dtype)
    first, second = (
        each.run_experts(*routes, each.pack_experts(experts, quantization))
        for each in (native.make_ops(), NativeOps(require_library(), 3).make_ops())
    )
    assert torch.equal(first, second)


@pytest.mark.parametrize("kind", ["float32", "half", "bfloat16"])
def test_unpacked_experts_are_the_same_matrices(native: NativeOps, kind: str) -> None:
    experts, _, _ = make_kind(kind, SHAPES[1])
    for ops in (native.make_ops(), torch_ops.make_ops()):
        unpacked = ops.unpack_experts(ops.pack_experts(experts, None))
        assert torch.equal(unpacked.gate_up, experts.gate_up) and torch.equal(unpacked.down, experts.down)
        for actual, expected in (
            (unpacked.gate_up_bias, experts.gate_up_bias),
            (unpacked.down_bias, experts.down_bias),
        ):
            assert actual is not None and expected is not None
            assert torch.equal(actual.float(), expected.float())


@pytest.mark.parametrize("kind", KINDS)
def test_nan_stays_in_its_token(ops: NativeOps, kind: str) -> None:
    experts, quantization, dtype = make_kind(kind, SHAPES[1])
    x, ids, weights = make_routes(9, 63, 5, 2, dtype)
    x[4, 7] = torch.nan
    out = ops.make_ops().run_experts(x, ids, weights, ops.make_ops().pack_experts(experts, quantization))
    assert torch.equal(out.isnan().any(dim=1), torch.arange(9) == 4)
