"""Attention of a flattened batch over paged keys and values."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.torch.attention_plan import AttentionPlan, Gather, Segment, UniformBatch
from kernels.torch.elementwise import take_slots

# Queries of `partial_attention` attended at once, which bounds the memory of their scores.
PARTIAL_PIECE_LEN = 64


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    plan: AttentionPlan | None = None,
) -> Tensor:
    """Implement `kernels.ops.PagedAttention`."""
    if plan is None:
        query_lens = query_start_loc.diff().tolist()
        plan = AttentionPlan(block_tables, query_lens, seq_lens.tolist(), k_cache.shape[1])
    keys, values = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
    layout = plan.layout(sliding_window, q, k_cache)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for batch in layout.batches:
        _attend_batch(q, keys, values, batch, out, scale, soft_cap, sinks)
    for segment in layout.segments:
        _attend_segment(q, keys, values, segment, out, scale, soft_cap, sinks)
    return out


def partial_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, scale: float, soft_cap: float | None, plan: AttentionPlan
) -> tuple[Tensor, Tensor]:
    """Implement `kernels.ops.PartialAttention`, one request after the other."""
    num_kv_heads = k_cache.shape[2]
    out, log_sums = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    for start, end, slots in plan.list_contexts():
        keys, values = (take_slots(cache.flatten(0, 1), slots).float() for cache in (k_cache, v_cache))
        places = torch.arange(len(slots), device=q.device)
        for first in range(start, end, PARTIAL_PIECE_LEN):
            last = min(first + PARTIAL_PIECE_LEN, end)
            rows = q[first:last].float().unflatten(1, (num_kv_heads, -1))
            scores = torch.einsum("qkgd,nkd->qkgn", rows, keys) * scale
            if soft_cap is not None:
                scores = torch.tanh(scores / soft_cap) * soft_cap
            num_seen = len(slots) - end + 1 + torch.arange(first, last, device=q.device)
            scores.masked_fill_(places >= num_seen.view(-1, 1, 1, 1), -torch.inf)
            log_sums[first:last] = scores.logsumexp(dim=-1).flatten(1)
            attended = torch.einsum("qkgn,nkd->qkgd", scores.softmax(dim=-1), values)
            out[first:last] = attended.flatten(1, 2).to(q.dtype)
    return out, log_sums


def _attend_batch(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: UniformBatch,
    out: Tensor,
    scale: float,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> None:
    """Attend the requests of one batch. The heads of a group act as more queries of their shared KV head."""
    index = batch.token_index
    rows = q if index is None else q.index_select(0, index)
    result = out if index is None else torch.empty_like(rows)
    shape = (batch.num_requests, batch.query_len, keys.shape[1], -1, q.shape[2])
    # [N, query_len, KV, G, D] -> [N, KV, query_len * G, D]; a view where query_len is 1
    grouped = rows.view(shape).transpose(1, 2).flatten(2, 3)
    target = result.view(shape).transpose(1, 2)
    if sinks is not None:
        # [KV, query_len * G, 1], the heads of a group for each query
        sinks = sinks.view(keys.shape[1], 1, -1).expand(-1, batch.query_len, -1).reshape(keys.shape[1], -1, 1)
    for chunk in batch.chunks:
        _gather(keys, values, chunk.gather)
        rows = grouped[chunk.start : chunk.end]
        attended = _attend(rows, chunk.k, chunk.v, chunk.bias, scale, soft_cap, sinks)
        part = target[chunk.start : chunk.end]
        part.copy_(attended.view(part.shape))
    if index is not None:
        out.index_copy_(0, index, result)


def _attend_segment(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    segment: Segment,
    out: Tensor,
    scale: float,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> None:
    """Attend one request with many new tokens. KV heads act as a batch, the heads of a group as heads."""
    _gather(keys, values, segment.gather)
    if sinks is not None:
        sinks = sinks.view(keys.shape[1], -1, 1, 1)
    for piece in segment.pieces:
        rows = slice(piece.start, piece.end)
        shape = (piece.end - piece.start, keys.shape[1], -1, q.shape[2])
        grouped = q[rows].view(shape).permute(1, 2, 0, 3)
        is_causal = piece.bias is None
        attended = _attend(grouped, piece.k, piece.v, piece.bias, scale, soft_cap, sinks, is_causal)
        out[rows].view(shape).copy_(attended.permute(2, 0, 1, 3))


def _gather(keys: Tensor, values: Tensor, gather: Gather) -> None:
    if keys.dtype == gather.k.dtype:
        torch.index_select(keys, 0, gather.slots, out=gather.k)
        torch.index_select(values, 0, gather.slots, out=gather.v)
    else:
        gather.k.copy_(take_slots(keys, gather.slots))
        gather.v.copy_(take_slots(values, gather.slots))


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    scale: float,
    soft_cap: float | None,
    sinks: Tensor | None,
    is_causal: bool = False,
) -> Tensor:
    """Plain attention of [N, H, Q, D] over [N, H, num_keys, D]; `bias` is added to the scores."""
    if soft_cap is None and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=is_causal, scale=scale)
    scores = torch.matmul(q.float(), k.float().transpose(-2, -1)).mul_(scale / (soft_cap or 1.0))
    if soft_cap is not None:
        scores.tanh_().mul_(soft_cap)
    if bias is not None:
        scores += bias
    if is_causal:
        ones = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device)
        scores.masked_fill_(~ones.tril_(), -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.float().expand(*scores.shape[:-1], 1)), dim=-1)
    weights = scores.softmax(dim=-1)[..., : k.shape[-2]]
    return torch.matmul(weights, v.float()).to(q.dtype)
