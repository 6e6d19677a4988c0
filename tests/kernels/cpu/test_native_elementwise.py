"""Native norms, RoPE with the cache write, and the gated activation against their slow twins."""

from __future__ import annotations

import pytest
import torch

from kernels import reference
from kernels.cpu.native_ops import NativeOps

DTYPES = [torch.float32, torch.bfloat16]
SIZES = [1, 63, 100, 1000]
# bfloat16 keeps 8 bits; the twin may round twice
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


def make(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_tokens", [1, 100])
def test_rms_norm(ops: NativeOps, num_tokens: int, size: int, dtype: torch.dtype) -> None:
    x, weight = make(num_tokens, size, dtype=dtype), make(size, dtype=dtype, seed=1)
    assert_close(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


def test_rms_norm_with_a_weight_per_head_of_a_strided_view(ops: NativeOps) -> None:
    fused, weight = make(63, 8, 60), make(6, 60, seed=1)
    assert_close(ops.rms_norm(fused[:, :6], weight, 1e-6), reference.rms_norm(fused[:, :6], weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_tokens", [1, 100])
def test_add_rms_norm_updates_the_residual_in_place(
    ops: NativeOps, num_tokens: int, size: int, dtype: torch.dtype
) -> None:
    x, residual = make(num_tokens, size, dtype=dtype), make(num_tokens, size, dtype=dtype, seed=1)
    weight = make(size, dtype=dtype, seed=2)
    expected, expected_sum = reference.add_rms_norm(x, residual.clone(), weight, 1e-6)
    actual, actual_sum = ops.add_rms_norm(x, residual, weight, 1e-6)
    assert actual_sum is residual
    assert torch.equal(actual_sum, expected_sum)
    assert_close(actual, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_silu_mul(ops: NativeOps, size: int, dtype: torch.dtype) -> None:
    gate_up = make(63, 2 * size, dtype=dtype) * 10
    before = gate_up.clone()
    assert_close(ops.silu_mul(gate_up), reference.silu_mul(gate_up))
    assert torch.equal(gate_up, before)


def test_silu_mul_of_extremes_is_finite(ops: NativeOps) -> None:
    gate_up = torch.tensor([[-1e4, -100.0, -88.0, 0.0, 88.0, 100.0, 1e4, *[1.0] * 7]])
    assert_close(ops.silu_mul(gate_up), reference.silu_mul(gate_up))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("head_dim", [2, 60, 64, 128])
@pytest.mark.parametrize("num_tokens", [1, 63])
def test_norm_rope_store(
    ops: NativeOps, num_tokens: int, head_dim: int, has_norm: bool, dtype: torch.dtype
) -> None:
    """Queries come back; keys and values are in their slots, and nothing else of the caches has changed."""
    heads = make(num_tokens, 4 + 2 * 2, head_dim, dtype=dtype)
    qk_norm = make(6, head_dim, dtype=dtype, seed=1) if has_norm else None
    angles = make(num_tokens, 1, head_dim // 2, seed=2) * 100
    cos = torch.cat((angles.cos(), angles.cos()), dim=-1)
    sin = torch.cat((-angles.sin(), angles.sin()), dim=-1)
    slots = torch.randperm(9 * 16, generator=torch.Generator().manual_seed(0))[:num_tokens]
    caches = [torch.full((9, 16, 2, head_dim), torch.nan, dtype=dtype) for _ in range(4)]
    qk = heads[:, :6] if qk_norm is None else reference.rms_norm(heads[:, :6], qk_norm, 1e-6)
    qk = reference.apply_rope(qk, cos, sin)
    reference.store_kv(qk[:, 4:], heads[:, 6:], caches[2], caches[3], slots)
    q = ops.norm_rope_store(heads, qk_norm, 1e-6, cos, sin, caches[0], caches[1], slots, 4)
    tolerance = max(4e-6, TOLERANCE[dtype])
    torch.testing.assert_close(q, qk[:, :4], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(caches[0], caches[2], atol=tolerance, rtol=tolerance, equal_nan=True)
    torch.testing.assert_close(caches[1], caches[3], atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_do_not_depend_on_their_batch(ops: NativeOps, dtype: torch.dtype) -> None:
    x, weight = make(100, 1000, dtype=dtype), make(1000, dtype=dtype, seed=1)
    together = ops.rms_norm(x, weight, 1e-5)
    gated = ops.silu_mul(x)
    for row in (0, 57, 99):
        assert torch.equal(ops.rms_norm(x[row : row + 1], weight, 1e-5)[0], together[row])
        assert torch.equal(ops.silu_mul(x[row : row + 1])[0], gated[row])


def test_wrong_operands_are_refused(native: NativeOps) -> None:
    with pytest.raises(AssertionError, match="float16"):
        native.rms_norm(torch.ones(2, 4, dtype=torch.float16), torch.ones(4), 1e-6)
    with pytest.raises(AssertionError, match=r"residual must be \[2, 4\]"):
        native.add_rms_norm(torch.ones(2, 4), torch.ones(2, 5), torch.ones(4), 1e-6)
