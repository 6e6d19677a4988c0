"""Attention of a flattened batch over paged keys and values."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.torch.attention_plan import MAX_SHORT_LEN, AttentionPlan, Part
from kernels.torch.elementwise import take_slots


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
    parts = plan.list_parts(sliding_window, k_cache, q)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for part in parts:
        _gather(keys, part.slots, part.k)
        _gather(values, part.slots, part.v)
        rows = out[part.rows]  # a view, or a copy where the rows are no slice
        _attend_part(q[part.rows], part, rows, scale, soft_cap, sinks)
        if isinstance(part.rows, Tensor):
            out[part.rows] = rows
    return out


def _attend_part(
    q: Tensor, part: Part, out: Tensor, scale: float, soft_cap: float | None, sinks: Tensor | None
) -> None:
    """Attend queries [num_requests * query_len, H, D] over the gathered keys and values of a part."""
    num_kv_heads = part.k.shape[1]
    shape = (part.num_requests, part.query_len, num_kv_heads, -1, q.shape[2])
    if part.query_len <= MAX_SHORT_LEN:
        # The heads of a group act as more queries of their shared key head: [N, KV, query_len * G, D].
        rows = q.view(shape).transpose(1, 2).flatten(2, 3)
        target = out.view(shape).transpose(1, 2)
        if sinks is not None:
            sinks = sinks.view(num_kv_heads, 1, -1).expand(-1, part.query_len, -1).reshape(num_kv_heads, -1, 1)
    else:
        # The key heads act as a batch, and the heads of a group share their keys: [KV, G, query_len, D].
        rows = q.view(shape)[0].permute(1, 2, 0, 3)
        target = out.view(shape)[0].permute(1, 2, 0, 3)
        if sinks is not None:
            sinks = sinks.view(num_kv_heads, -1, 1, 1)
    attended = _attend(rows, part.k_heads, part.v_heads, part.bias, scale, soft_cap, sinks, part.is_causal)
    target.copy_(attended.view(target.shape))


def _gather(cache: Tensor, slots: Tensor, out: Tensor) -> None:
    if cache.dtype == out.dtype:
        torch.index_select(cache, 0, slots, out=out)
    else:
        out.copy_(take_slots(cache, slots))


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
