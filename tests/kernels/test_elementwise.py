"""Norms, RoPE, the gated activation and the cache write against their slow twins."""

from __future__ import annotations

import pytest
import torch

import kernels
from kernels import reference

SIZES = [1, 63, 100]
HEAD_DIMS = [60, 64, 128]
DTYPES = [torch.float32, torch.bfloat16]
# bfloat16 keeps 8 bits; a result may be rounded twice
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


def make(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 63, 100, 1000])
@pytest.mark.parametrize("num_tokens", SIZES)
def test_rms_norm(num_tokens: int, size: int, dtype: torch.dtype) -> None:
    x, weight = make(num_tokens, size, dtype=dtype), make(size, dtype=dtype, seed=1)
    before = x.clone()
    assert_close(kernels.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    assert torch.equal(x, before)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_rms_norm_with_a_weight_per_head_of_a_strided_view(head_dim: int) -> None:
    fused, weight = make(63, 8, head_dim), make(6, head_dim, seed=1)
    actual = kernels.rms_norm(fused[:, :6], weight, 1e-6)
    assert_close(actual, reference.rms_norm(fused[:, :6], weight, 1e-6))


def test_rms_norm_of_zeros_is_zero() -> None:
    assert torch.equal(kernels.rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6), torch.zeros(2, 8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", SIZES)
def test_add_rms_norm_updates_the_residual_in_place(num_tokens: int, dtype: torch.dtype) -> None:
    x, residual = make(num_tokens, 100, dtype=dtype), make(num_tokens, 100, dtype=dtype, seed=1)
    weight = make(100, dtype=dtype, seed=2)
    expected, expected_sum = reference.add_rms_norm(x, residual.clone(), weight, 1e-6)
    actual, actual_sum = kernels.add_rms_norm(x, residual, weight, 1e-6)
    assert actual_sum is residual
    assert torch.equal(actual_sum, expected_sum)
    assert_close(actual, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("num_tokens", SIZES)
def test_apply_rope(num_tokens: int, head_dim: int, dtype: torch.dtype) -> None:
    x = make(num_tokens, 8, head_dim, dtype=dtype)[:, :6]
    angles = make(num_tokens, 1, head_dim // 2, seed=1) * 100
    cos = torch.cat((angles.cos(), angles.cos()), dim=-1)
    sin = torch.cat((-angles.sin(), angles.sin()), dim=-1)
    actual = kernels.apply_rope(x, cos, sin)
    assert actual.dtype == dtype
    assert_close(actual, reference.apply_rope(x, cos, sin))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 63, 100])
def test_silu_mul(size: int, dtype: torch.dtype) -> None:
    gate_up = make(63, 2 * size, dtype=dtype)
    before = gate_up.clone()
    assert_close(kernels.silu_mul(gate_up), reference.silu_mul(gate_up))
    assert torch.equal(gate_up, before)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("num_tokens", SIZES)
def test_store_kv_writes_its_slots_and_no_other(num_tokens: int, head_dim: int) -> None:
    fused = make(num_tokens, 6, head_dim)
    k, v = fused[:, 2:4], fused[:, 4:]
    slots = torch.randperm(9 * 16, generator=torch.Generator().manual_seed(0))[:num_tokens]
    caches = [torch.full((9, 16, 2, head_dim), torch.nan) for _ in range(4)]
    kernels.store_kv(k, v, caches[0], caches[1], slots)
    reference.store_kv(k, v, caches[2], caches[3], slots)
    torch.testing.assert_close(caches[0], caches[2], equal_nan=True, atol=0, rtol=0)
    torch.testing.assert_close(caches[1], caches[3], equal_nan=True, atol=0, rtol=0)
