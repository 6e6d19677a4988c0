"""Head norms, RoPE and the cache write in one op, for every implementation that runs on this machine."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import Ops, reference, torch_ops


def make(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def run(ops: Ops | None, has_norm: bool, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and both caches, by the ops or by the slow twin."""
    heads = make(num_tokens, 4 + 2 * 2, 16, seed=0)
    qk_norm = make(6, 16, seed=1) if has_norm else None
    angles = make(num_tokens, 1, 8, seed=2) * 100
    cos = torch.cat((angles.cos(), angles.cos()), dim=-1)
    sin = torch.cat((-angles.sin(), angles.sin()), dim=-1)
    slots = torch.randperm(6 * 16, generator=torch.Generator().manual_seed(3))[:num_tokens]
    k_cache, v_cache = (torch.full((6, 16, 2, 16), torch.nan) for _ in range(2))
    op = reference.norm_rope_store if ops is None else ops.norm_rope_store
    q = op(heads, qk_norm, 1e-6, cos, sin, k_cache, v_cache, slots, 4)
    return q, k_cache, v_cache


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 2, 63])
def test_equals_the_reference(num_tokens: int, has_norm: bool) -> None:
    actual = run(torch_ops.make_ops(), has_norm, num_tokens)
    expected = run(None, has_norm, num_tokens)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5, equal_nan=True)


def test_padding_tokens_write_only_into_the_null_block() -> None:
    ops = torch_ops.make_ops()
    caches = [torch.zeros(3, 4, 1, 2) for _ in range(2)]
    ones = torch.ones(3, 1, 2)
    ops.norm_rope_store(torch.ones(3, 3, 2), None, 1e-6, ones, ones, *caches, torch.zeros(3).long(), 1)
    assert all(cache[0, 0].any() and not cache[1:].any() for cache in caches)
