"""Every op in its slow and obvious form: float32, loops over requests, same signature as the fast one.

Tests compare the fast ops with these; nothing else calls them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.attention_plan import AttentionPlan


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Twin of `kernels.store_kv`."""
    block_size = k_cache.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        k_cache[slot // block_size, slot % block_size] = k[token]
        v_cache[slot // block_size, slot % block_size] = v[token]


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
    plan: AttentionPlan | None = None,
) -> Tensor:
    """Twin of `kernels.paged_attention`; `plan` is not used."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    starts = query_start_loc.tolist()
    for request, seq_len in enumerate(seq_lens.tolist()):
        rows = slice(starts[request], starts[request + 1])
        k = _gather(k_cache, block_tables[request], seq_len)
        v = _gather(v_cache, block_tables[request], seq_len)
        out[rows] = _attend(q[rows].float(), k, v, scale, sliding_window, soft_cap).to(q.dtype)
    return out


def _gather(cache: Tensor, block_table: Tensor, seq_len: int) -> Tensor:
    """Return the context of one request, [seq_len, num_kv_heads, head_dim] float32."""
    block_size = cache.shape[1]
    blocks = block_table.tolist()
    slots = [cache[blocks[i // block_size], i % block_size] for i in range(seq_len)]
    return torch.stack(slots).float()


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, sliding_window: int | None, soft_cap: float | None
) -> Tensor:
    """Attend the last q.shape[0] positions of one request over its whole context."""
    num_queries, num_heads, _ = q.shape
    seq_len, num_kv_heads, _ = k.shape
    out = torch.empty_like(q)
    for head in range(num_heads):
        kv_head = head * num_kv_heads // num_heads
        for i in range(num_queries):
            position = seq_len - num_queries + i
            first = 0 if sliding_window is None else max(0, position + 1 - sliding_window)
            scores = k[first : position + 1, kv_head] @ q[i, head] * scale
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            out[i, head] = scores.softmax(0) @ v[first : position + 1, kv_head]
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Twin of `kernels.rms_norm`."""
    wide = x.float()
    mean_square = (wide * wide).mean(dim=-1, keepdim=True)
    return (wide / torch.sqrt(mean_square + eps) * weight.float()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Twin of `kernels.add_rms_norm`."""
    residual.copy_(x + residual)
    return rms_norm(residual, weight, eps), residual


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Twin of `kernels.apply_rope`, written as the rotation of (first, second) by the angle."""
    half = x.shape[-1] // 2
    first, second = x.float().split(half, dim=-1)
    cos, sin = cos[..., :half], sin[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Twin of `kernels.silu_mul`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)
