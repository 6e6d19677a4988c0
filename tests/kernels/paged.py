"""Paged batches for kernel tests: shuffled pages, NaN in every slot that belongs to no request."""

import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.cpu.native_ops import NativeOps
from kernels.cpu.pieces import turn_into_pieces
from kernels.ops import INT8_SCALE_BYTES
from kernels.torch.attention import AttentionPlan


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """The tensors of one attention call, as `kernels.torch.attention.paged_attention` takes them."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    plan: AttentionPlan

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        return (self.q, self.k_cache, self.v_cache, self.block_tables, self.query_start_loc, self.seq_lens)


def make_batch(
    lens: list[tuple[int, int]],
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> PagedBatch:
    """Lay out requests of (query length, context length). The contents of request i depend only on i."""
    random_blocks = random.Random(seed)
    counts = [-(-seq_len // block_size) for _, seq_len in lens]
    free = list(range(1, sum(counts) + 9))
    random_blocks.shuffle(free)
    shape = (len(free) + 1, block_size, num_kv_heads, head_dim)
    k_cache, v_cache = torch.full(shape, torch.nan, dtype=dtype), torch.full(shape, torch.nan, dtype=dtype)
    tables = torch.zeros(len(lens), max(counts), dtype=torch.int32)
    queries = []
    for request, (query_len, seq_len) in enumerate(lens):
        blocks = [free.pop() for _ in range(counts[request])]
        tables[request, : len(blocks)] = torch.tensor(blocks)
        generator = torch.Generator().manual_seed(request)
        positions = torch.arange(seq_len)
        places = (torch.tensor(blocks)[positions // block_size], positions % block_size)
        for cache in (k_cache, v_cache):
            cache[places] = torch.randn(seq_len, *shape[2:], generator=generator).to(dtype)
        queries.append(torch.randn(query_len, num_heads, head_dim, generator=generator).to(dtype))
    query_lens, seq_lens = [pair[0] for pair in lens], [pair[1] for pair in lens]
    return PagedBatch(
        torch.cat(queries),
        k_cache,
        v_cache,
        tables,
        torch.tensor([0, *query_lens]).cumsum(0).int(),
        torch.tensor(seq_lens).int(),
        AttentionPlan(tables, query_lens, seq_lens, block_size),
    )


def to_pieces(batch: PagedBatch) -> PagedBatch:
    """The same batch with its keys and values in the layout of the native ops."""
    k_cache, v_cache = batch.k_cache.clone(), batch.v_cache.clone()
    turn_into_pieces(k_cache, v_cache)
    return replace(batch, k_cache=k_cache, v_cache=v_cache)


def to_int8(batch: PagedBatch, ops: NativeOps) -> PagedBatch:
    """The same batch over an int8 cache; slots that belong to no request hold NaN for a scale."""
    shape = (*batch.k_cache.shape[:3], batch.k_cache.shape[3] + INT8_SCALE_BYTES)
    k_cache, v_cache = (torch.full(shape, -1, dtype=torch.int8) for _ in range(2))
    slots = (~batch.k_cache[:, :, 0, 0].isnan()).flatten().nonzero().flatten()
    keys, values = (cache.flatten(0, 1)[slots] for cache in (batch.k_cache, batch.v_cache))
    ops.store_kv(keys, values, k_cache, v_cache, slots)
    return replace(batch, k_cache=k_cache, v_cache=v_cache)


def spoil_hidden_keys(tensors: tuple[Tensor, ...], window: int) -> None:
    """Put NaN in place of the keys and values that have left the window of every new token of their request."""
    _, k_cache, v_cache, tables, query_start_loc, seq_lens = tensors
    block_size = k_cache.shape[1]
    first_seen = seq_lens - query_start_loc.diff() + 1 - window
    for request, first in enumerate(first_seen.tolist()):
        for position in range(first):
            place = (int(tables[request, position // block_size]), position % block_size)
            k_cache[place] = v_cache[place] = torch.nan
