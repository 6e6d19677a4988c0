"""Norms, activations, RoPE with the cache write, masks and gathered inputs against their slow twins."""

import pytest
import torch
from torch import Tensor

from kernels.triton.add_rms_norm import add_rms_norm
from kernels.triton.gather_inputs import gather_inputs
from kernels.triton.norm_rope_store import norm_rope_store
from kernels.triton.rms_norm import gated_norm, rms_norm
from kernels.triton.silu_mul import silu_mul
from kernels.triton.token_bitmask import apply_bitmask
from tests.kernels import reference
from tests.kernels.steps import run_gather
from tests.kernels.triton.batches import TOLERANCE

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.float16]
SIZES = [1, 63, 1000]


def make(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def poison(shape: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.full(shape, torch.nan, dtype=like.dtype, device=like.device)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_rms_norm_equals_the_reference(device: torch.device, size: int, dtype: torch.dtype) -> None:
    x, weight = make((5, size), dtype, device), make((size,), dtype, device, 1)
    out = rms_norm(x, weight, 1e-5, out=poison((5, size), x))
    assert_close(out, reference.rms_norm(x, weight, 1e-5))


def test_rms_norm_takes_one_weight_per_head(device: torch.device) -> None:
    x, weight = make((3, 5, 60), torch.float32, device), make((5, 60), torch.float32, device, 1)
    assert_close(rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize(("num_weights", "is_gate_first"), [(1, False), (3, True)])
@pytest.mark.parametrize("size", SIZES)
def test_a_gated_norm_equals_norm_and_gate(
    device: torch.device, size: int, num_weights: int, is_gate_first: bool
) -> None:
    x, gates = make((5, 3, size), torch.float32, device), make((5, 7 * size), torch.float32, device, 1)
    weight, gate = make((num_weights, size), torch.float32, device, 2), gates[:, size : 4 * size]
    factor = torch.nn.functional.silu(gate.reshape(5, 3, size))
    expected = reference.rms_norm(x * factor, weight, 1e-5) if is_gate_first else reference.rms_norm(x, weight, 1e-5)
    found = gated_norm(x.flatten(1), gate, weight, 1e-5, torch.float16, is_gate_first=is_gate_first)
    assert_close(found, (expected if is_gate_first else expected * factor).flatten(1).half())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_add_rms_norm_equals_the_reference(device: torch.device, size: int, dtype: torch.dtype) -> None:
    x, residual = make((3, size), dtype, device), make((3, size), dtype, device, 1)
    weight, before, expected_sum = make((size,), dtype, device, 2), x.clone(), residual.clone()
    expected, _ = reference.add_rms_norm(x, expected_sum, weight, 1e-5)
    normed, total = add_rms_norm(x, residual, weight, 1e-5, out=poison((3, size), x))
    assert total is residual and torch.equal(x, before)
    assert torch.equal(residual, expected_sum)
    assert_close(normed, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [*SIZES, 1025])
def test_silu_mul_equals_the_reference(device: torch.device, size: int, dtype: torch.dtype) -> None:
    gate_up = make((3, 2 * size), dtype, device) * 4
    gate_up[0, 0] = -60.0
    assert_close(silu_mul(gate_up, out=poison((3, size), gate_up)), reference.silu_mul(gate_up))


def run_norm_rope_store(
    device: torch.device,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    has_norm: bool = True,
) -> None:
    num_tokens, total = 5, num_heads + 2 * num_kv_heads
    heads = make((num_tokens, total + 1, head_dim), dtype, device)[:, :total] * 3
    qk_norm = make((num_heads + num_kv_heads, head_dim), dtype, device, 1) if has_norm else None
    angles = make((num_tokens, 1, head_dim // 2), torch.float32, device, 2)
    cos = torch.cat((angles.cos(), angles.cos()), -1)
    sin = torch.cat((-angles.sin(), angles.sin()), -1)
    slots = torch.tensor([9, 0, 5, 16, 3], device=device)
    shape = (5, 4, num_kv_heads, head_dim)
    caches = [torch.full(shape, 7.0, device=device).to(cache_dtype or dtype) for _ in range(4)]
    expected = reference.norm_rope_store(heads, qk_norm, 1e-6, cos, sin, *caches[:2], slots, num_heads)
    before = heads.clone()
    out = poison(tuple(expected.shape), expected)
    q = norm_rope_store(heads, qk_norm, 1e-6, cos, sin, *caches[2:], slots, num_heads, out=out)
    assert_close(q, expected)
    assert torch.equal(heads, before)
    for actual, wanted in zip(caches[2:], caches[:2], strict=True):
        if cache_dtype is None:
            assert_close(actual, wanted)
        else:  # a rounding border may fall between two sums that differ in their last bit
            is_equal = actual.view(torch.uint8) == wanted.view(torch.uint8)
            assert is_equal.float().mean() > 0.99
            torch.testing.assert_close(actual.float(), wanted.float(), atol=2**-9, rtol=0.13)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(1, 1, 8), (4, 2, 128), (15, 3, 60)])
def test_norm_rope_store_equals_the_reference(
    device: torch.device, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    run_norm_rope_store(device, num_heads, num_kv_heads, head_dim, dtype)


def test_head_norms_are_optional(device: torch.device) -> None:
    run_norm_rope_store(device, 4, 2, 16, has_norm=False)


def test_an_fp8_cache_gets_the_nearest_value(device: torch.device) -> None:
    run_norm_rope_store(device, 4, 2, 64, cache_dtype=torch.float8_e4m3fn)


def test_fp8_encoding_equals_torch_on_every_border(device: torch.device) -> None:
    """All codes, and what lies just around the middle between two of them."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).float()
    codes = codes[codes.isfinite()]
    middles = (codes[1:] + codes[:-1]) / 2
    values = torch.cat((codes, middles, middles.nextafter(codes[1:]), middles.nextafter(codes[:-1])))
    values = torch.cat((values, torch.tensor([1e-9, 2**-10, 2**-11, 449.0, 1e5, torch.inf, torch.nan])))
    values = torch.nn.functional.pad(values, (0, -len(values) % 256)).view(-1, 1, 256)
    heads = values.repeat(1, 3, 1).to(device)  # query, key and value alike; no rotation
    num_tokens = heads.shape[0]
    cos = torch.ones(num_tokens, 1, 256, device=device)
    sin = torch.zeros_like(cos)
    caches = [torch.zeros(num_tokens, 1, 1, 256, device=device).to(torch.float8_e4m3fn) for _ in range(2)]
    norm_rope_store(heads, None, 0.0, cos, sin, *caches, torch.arange(num_tokens, device=device), 1)
    wanted = values.where(values.isnan(), values.clamp(-448, 448)).to(torch.float8_e4m3fn)
    stored = caches[1].cpu().float().flatten()
    torch.testing.assert_close(stored, wanted.float().flatten(), atol=0, rtol=0, equal_nan=True)


def test_tokens_below_slot_zero_are_not_written(device: torch.device) -> None:
    heads = make((2, 3, 8), torch.float32, device)
    cos, sin = torch.ones(2, 1, 8, device=device), torch.zeros(2, 1, 8, device=device)
    caches = [torch.zeros(3, 2, 1, 8, device=device) for _ in range(2)]
    norm_rope_store(heads, None, 0.0, cos, sin, *caches, torch.tensor([-1, 4], device=device), 1)
    written = [cache.flatten(0, 1).any(dim=-1).flatten().tolist() for cache in caches]
    assert written == [[False] * 4 + [True, False]] * 2


@pytest.mark.parametrize("vocab_size", [1, 32, 100, 2500])
def test_masks_forbid_tokens(device: torch.device, vocab_size: int) -> None:
    logits = make((6, vocab_size), torch.float32, device)
    generator = torch.Generator().manual_seed(1)
    num_words = max(1, vocab_size // 32)  # the last tokens have no word where the size is odd
    bitmask = torch.randint(-(2**31), 2**31, (6, num_words), generator=generator).int().to(device)
    expected = logits.clone()
    reference.apply_bitmask(expected, bitmask)
    apply_bitmask(logits, bitmask)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("seed", range(2))
def test_gathered_inputs_equal_the_reference(device: torch.device, seed: int) -> None:
    actual, expected = (run_gather(each, device, seed) for each in (gather_inputs, reference.gather_inputs))
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


def test_buffers_that_do_not_fit_are_refused(device: torch.device) -> None:
    x = make((3, 8), torch.float32, device)
    with pytest.raises(ValueError, match=r"out must have shape \(3, 8\)"):
        rms_norm(x, x[0], 1e-5, out=x[:2])
    with pytest.raises(ValueError, match="residual must be contiguous"):
        add_rms_norm(x[:, :4], x[:, :4], x[0, :4], 1e-5)
    with pytest.raises(ValueError, match=r"must be \[T, 2 \* M\]"):
        silu_mul(x[:, :3])
    with pytest.raises(ValueError, match="must be float32, float16 or bfloat16"):
        rms_norm(x.double(), x[0].double(), 1e-5)
