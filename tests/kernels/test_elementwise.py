"""Norms, RoPE with the cache write, and the gated activation of torch's and the native ops against the reference."""

import pytest
import torch

from kernels import Ops
from kernels import torch as torch_ops
from kernels.cpu.native_ops import NativeOps
from kernels.cpu.pieces import turn_into_pieces
from tests.kernels import reference
from tests.kernels.cpu.conftest import ARCHITECTURES, require_library

SIZES = [1, 63, 100, 1000]
# bfloat16 keeps 8 bits; a result may be rounded twice
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


@pytest.fixture(params=["torch", *ARCHITECTURES])
def ops(request: pytest.FixtureRequest) -> Ops:
    """Torch's ops, and native ones on two threads for each instruction set."""
    if request.param == "torch":
        return torch_ops.make_ops()
    return NativeOps(require_library(request.param), num_threads=2).make_ops()


def make(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance, equal_nan=True)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_tokens", [1, 63, 100])
def test_rms_norm(ops: Ops, num_tokens: int, size: int, dtype: torch.dtype) -> None:
    x, weight = make(num_tokens, size, dtype=dtype), make(size, dtype=dtype, seed=1)
    before = x.clone()
    assert_close(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    assert torch.equal(x, before)


@pytest.mark.parametrize("head_dim", [60, 128])
def test_rms_norm_with_a_weight_per_head_of_a_strided_view(ops: Ops, head_dim: int) -> None:
    fused, weight = make(63, 8, head_dim), make(6, head_dim, seed=1)
    assert_close(ops.rms_norm(fused[:, :6], weight, 1e-6), reference.rms_norm(fused[:, :6], weight, 1e-6))


def test_rms_norm_of_zeros_is_zero(ops: Ops) -> None:
    assert torch.equal(ops.rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6), torch.zeros(2, 8))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_tokens", [1, 100])
def test_add_rms_norm_updates_the_residual_in_place(ops: Ops, num_tokens: int, size: int, dtype: torch.dtype) -> None:
    x, residual = make(num_tokens, size, dtype=dtype), make(num_tokens, size, dtype=dtype, seed=1)
    weight = make(size, dtype=dtype, seed=2)
    expected, expected_sum = reference.add_rms_norm(x, residual.clone(), weight, 1e-6)
    actual, actual_sum = ops.add_rms_norm(x, residual, weight, 1e-6)
    assert actual_sum is residual
    assert torch.equal(actual_sum, expected_sum)
    assert_close(actual, expected)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", SIZES)
def test_silu_mul(ops: Ops, size: int, dtype: torch.dtype) -> None:
    gate_up = make(63, 2 * size, dtype=dtype) * 10
    before = gate_up.clone()
    assert_close(ops.silu_mul(gate_up), reference.silu_mul(gate_up))
    assert torch.equal(gate_up, before)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", SIZES)
def test_gelu(ops: Ops, size: int, dtype: torch.dtype) -> None:
    gate_up = make(63, 2 * size, dtype=dtype) * 3
    gate_up[0, :2] = torch.tensor([-1e4, 1e4])
    assert_close(ops.gelu_mul(gate_up), reference.gelu_mul(gate_up))
    assert_close(ops.gelu(gate_up), reference.gelu(gate_up))


def test_silu_mul_of_extremes_is_finite(ops: Ops) -> None:
    gate_up = torch.tensor([[-1e4, -100.0, -88.0, 0.0, 88.0, 100.0, 1e4, *[1.0] * 7]])
    assert_close(ops.silu_mul(gate_up), reference.silu_mul(gate_up))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("head_dim", [2, 60, 64, 128])
@pytest.mark.parametrize("num_tokens", [1, 63])
def test_norm_rope_store(ops: Ops, num_tokens: int, head_dim: int, has_norm: bool, dtype: torch.dtype) -> None:
    """Queries come back; keys and values are in their slots, and nothing else of the caches has changed."""
    heads = make(num_tokens, 4 + 2 * 2, head_dim, dtype=dtype)
    qk_norm = make(6, head_dim, dtype=dtype, seed=1) if has_norm else None
    angles = make(num_tokens, 1, head_dim // 2, seed=2) * 100
    cos = torch.cat((angles.cos(), angles.cos()), dim=-1)
    sin = torch.cat((-angles.sin(), angles.sin()), dim=-1)
    slots = torch.randperm(9 * 16, generator=torch.Generator().manual_seed(0))[:num_tokens]
    caches = [torch.full((9, 16, 2, head_dim), torch.nan, dtype=dtype) for _ in range(4)]
    expected = reference.norm_rope_store(heads, qk_norm, 1e-6, cos, sin, *caches[2:], slots, 4)
    q = ops.norm_rope_store(heads.clone(), qk_norm, 1e-6, cos, sin, caches[0], caches[1], slots, 4)
    if ops.has_pieces:
        turn_into_pieces(*caches[2:])
    tolerance = max(4e-6, TOLERANCE[dtype])
    torch.testing.assert_close(q, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(caches[0], caches[2], atol=tolerance, rtol=tolerance, equal_nan=True)
    torch.testing.assert_close(caches[1], caches[3], atol=0, rtol=0, equal_nan=True)


def test_padding_tokens_write_only_into_the_null_block(ops: Ops) -> None:
    caches = [torch.zeros(3, 4, 1, 2) for _ in range(2)]
    ones = torch.ones(3, 1, 2)
    ops.norm_rope_store(torch.ones(3, 3, 2), None, 1e-6, ones, ones, *caches, torch.zeros(3).long(), 1)
    assert all(cache[0, 0].any() and not cache[1:].any() for cache in caches)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_native_rows_do_not_depend_on_their_batch(architecture: str, dtype: torch.dtype) -> None:
    ops = NativeOps(require_library(architecture), num_threads=2)
    x, weight = make(100, 1000, dtype=dtype), make(1000, dtype=dtype, seed=1)
    together, gated = ops.rms_norm(x, weight, 1e-5), ops.silu_mul(x)
    for row in (0, 57, 99):
        assert torch.equal(ops.rms_norm(x[row : row + 1], weight, 1e-5)[0], together[row])
        assert torch.equal(ops.silu_mul(x[row : row + 1])[0], gated[row])


def test_wrong_operands_are_refused() -> None:
    native = NativeOps(require_library(), num_threads=2)
    with pytest.raises(AssertionError, match="float16"):
        native.rms_norm(torch.ones(2, 4, dtype=torch.float16), torch.ones(4), 1e-6)
    with pytest.raises(AssertionError, match=r"residual must be \[2, 4\]"):
        native.add_rms_norm(torch.ones(2, 4), torch.ones(2, 5), torch.ones(4), 1e-6)
