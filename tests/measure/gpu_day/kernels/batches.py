"""Batches for the benchmarks: random pages in random order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.triton.attention_plan import AttentionPlan
from tests.measure.gpu_day.kernels.timing import Bench

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Requests with the same number of new tokens and the same context, in the shape of a model's layer."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    plan: AttentionPlan
    num_bytes: int  # of keys and values that must be read
    num_flops: int

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        return (
            self.q,
            self.k_cache,
            self.v_cache,
            self.block_tables,
            self.query_start_loc,
            self.seq_lens,
        )


def make_attention(
    bench: Bench,
    num_requests: int,
    query_len: int,
    context: int,
    num_heads: int = 16,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    cache_dtype: torch.dtype | None = None,
) -> AttentionBatch:
    """Lay out `num_requests` requests whose contexts, new tokens included, are `context` tokens long."""
    blocks = -(-context // BLOCK_SIZE)
    num_blocks = num_requests * blocks + 1
    shape = (num_blocks, BLOCK_SIZE, num_kv_heads, head_dim)
    k_cache, v_cache = (
        torch.randn(shape, device=bench.device, dtype=bench.dtype).to(cache_dtype or bench.dtype)
        for _ in range(2)
    )
    order = torch.randperm(num_blocks - 1, device=bench.device) + 1
    lens = [query_len] * num_requests
    seen = query_len * context - query_len * (query_len - 1) // 2
    return AttentionBatch(
        torch.randn(num_requests * query_len, num_heads, head_dim, device=bench.device, dtype=bench.dtype),
        k_cache,
        v_cache,
        order.view(num_requests, blocks).int(),
        torch.tensor([0, *lens], device=bench.device).cumsum(0).int(),
        torch.full((num_requests,), context, device=bench.device, dtype=torch.int32),
        AttentionPlan(lens, [context] * num_requests),
        2 * num_requests * context * num_kv_heads * head_dim * k_cache.element_size(),
        4 * num_requests * seen * num_heads * head_dim,
    )
