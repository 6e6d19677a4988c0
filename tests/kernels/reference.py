"""Every op in its slow and obvious form: float32, loops over requests, same signature as the fast one.

Tests compare the fast ops with these; nothing else calls them.
"""

import math
from itertools import product

import torch
from torch import Tensor

from kernels.ops import ExpertWeights
from kernels.step_buffers import StepBuffers
from kernels.torch.attention import AttentionPlan


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
    """Twin of `kernels.torch.attention.paged_attention`; `plan` is not used."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    starts = query_start_loc.tolist()
    num_heads, num_kv_heads = q.shape[1], k_cache.shape[2]
    for request, seq_len in enumerate(seq_lens.tolist()):
        k, v = (_gather(cache, block_tables[request], seq_len) for cache in (k_cache, v_cache))
        for row, head in product(range(starts[request], starts[request + 1]), range(num_heads)):
            kv_head = head * num_kv_heads // num_heads
            end = seq_len - starts[request + 1] + row + 1  # behind the query's own position
            first = 0 if sliding_window is None else max(0, end - sliding_window)
            scores = k[first:end, kv_head] @ q[row, head].float() * scale
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            if sinks is not None:
                scores = torch.cat((scores, sinks[head : head + 1].float()))
            out[row, head] = (scores.softmax(0)[: end - first] @ v[first:end, kv_head]).to(q.dtype)
    return out


def _gather(cache: Tensor, block_table: Tensor, seq_len: int) -> Tensor:
    """Return the context of one request, [seq_len, num_kv_heads, head_dim] float32."""
    block_size = cache.shape[1]
    blocks = block_table.tolist()
    slots = [cache[blocks[i // block_size], i % block_size] for i in range(seq_len)]
    return torch.stack(slots).float()


def run_experts(x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertWeights) -> Tensor:
    """Twin of `kernels.torch.experts.run_experts`, over matrices that are not packed."""
    out = torch.zeros(x.shape, device=x.device)
    for token, token_ids in enumerate(ids.tolist()):
        for slot, expert in enumerate(token_ids):
            gate, up = (experts.gate_up[expert].float() @ x[token].float()).chunk(2)
            if experts.gate_up_bias is not None:
                gate_bias, up_bias = experts.gate_up_bias[expert].float().chunk(2)
                gate, up = gate + gate_bias, up + up_bias
            if (limit := experts.activation.limit) is not None:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + 1
            inner = gate * torch.sigmoid(experts.activation.alpha * gate) * up
            result = experts.down[expert].float() @ inner
            if experts.down_bias is not None:
                result = result + experts.down_bias[expert].float()
            out[token] += weights[token, slot] * result
    return out.to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Twin of `kernels.torch.elementwise.rms_norm`."""
    wide = x.float()
    mean_square = (wide * wide).mean(dim=-1, keepdim=True)
    return (wide / torch.sqrt(mean_square + eps) * weight.float()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Twin of `kernels.torch.elementwise.add_rms_norm`."""
    residual.copy_(x + residual)
    return rms_norm(residual, weight, eps), residual


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Twin of `kernels.torch.elementwise.apply_rope`, written as the rotation of (first, second) by the angle."""
    half = x.shape[-1] // 2
    first, second = x.float().split(half, dim=-1)
    cos, sin = cos[..., :half], sin[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Twin of `kernels.torch.elementwise.silu_mul`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)


def gelu(x: Tensor) -> Tensor:
    """Twin of `kernels.torch.elementwise.gelu`."""
    wide = x.float()
    inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)
    return (0.5 * wide * (1 + torch.tanh(inner))).to(x.dtype)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """Twin of `kernels.torch.elementwise.gelu_mul`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gelu(gate) * up).to(gate_up.dtype)


def norm_rope_store(
    heads: Tensor,
    qk_norm: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    num_heads: int,
) -> Tensor:
    """Twin of `kernels.torch.elementwise.norm_rope_store`; rounds once, and saturates where the cache is float8."""
    num_rotated = heads.shape[1] - k_cache.shape[2]
    wide = heads.float()
    qk, v = wide[:, :num_rotated], wide[:, num_rotated:]
    if qk_norm is not None:
        qk = rms_norm(qk, qk_norm.float(), eps)
    qk = apply_rope(qk, cos, sin)
    is_fp8 = k_cache.dtype == torch.float8_e4m3fn
    keys, values = ((each.clamp(-448, 448) if is_fp8 else each) for each in (qk[:, num_heads:], v))
    for token, slot in enumerate(slot_mapping.tolist()):
        block, offset = divmod(slot, k_cache.shape[1])
        k_cache[block, offset] = keys[token].to(k_cache.dtype)
        v_cache[block, offset] = values[token].to(v_cache.dtype)
    return qk[:, :num_heads].to(heads.dtype)


def gather_inputs(
    token_pool: Tensor,
    block_tables: Tensor,
    rows: Tensor,
    starts: Tensor,
    query_start_loc: Tensor,
    block_size: int,
    out: StepBuffers,
) -> None:
    """Twin of `Ops.gather_inputs`."""
    for buffer in (out.input_ids, out.positions, out.slot_mapping, out.block_tables):
        buffer.zero_()
    out.seq_lens.fill_(1)
    bounds = query_start_loc.tolist()
    for request, row in enumerate(rows.tolist()):
        if row < 0:
            continue
        start, num_new = int(starts[request]), bounds[request + 1] - bounds[request]
        out.seq_lens[request] = start + num_new
        out.block_tables[:, request] = block_tables[:, row, : out.block_tables.shape[2]]
        for i in range(num_new):
            token, position = bounds[request] + i, start + i
            out.positions[token] = position
            out.input_ids[token] = token_pool[row, position]
            block = block_tables[:, row, position // block_size].long()
            out.slot_mapping[:, token] = block * block_size + position % block_size


def apply_bitmask(logits: Tensor, bitmask: Tensor) -> None:
    """Twin of `kernels.torch.sampling.apply_bitmask`."""
    for row, words in enumerate(bitmask.tolist()):
        for token in range(logits.shape[1]):
            word = words[token // 32] if token // 32 < len(words) else 0
            if not word >> (token % 32) & 1:
                logits[row, token] = -torch.inf


def linear_int8(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Twin of a product with int8 weights: each row of both sides is rounded to -127..127 of its greatest value."""
    columns = []
    for row in weight.float():
        scale = row.abs().max() / 127
        columns.append((row / scale).round() * scale if scale > 0 else row)
    tokens = []
    for token in x.float():
        scale = token.abs().max() / 127
        tokens.append((token / scale).round() * scale if scale > 0 else token)
    result = torch.stack(tokens) @ torch.stack(columns).t()
    return (result if bias is None else result + bias.float()).to(x.dtype)


def read_int8_cache(k_cache: Tensor, v_cache: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return the float32 numbers of int8 caches, [num_blocks, block_size, num_kv_heads, head_dim] each.

    16 slots of a head are one piece: keys[word][slot][4], values[4 slots][dim][slot], and 16 scales.
    """
    num_blocks, block_size, num_kv_heads, _ = k_cache.shape
    found = []
    for cache, zero in ((k_cache, 128), (v_cache, 0)):
        pieces = cache.view(torch.uint8).view(-1, num_kv_heads, 16 * (head_dim + 4))
        scales = pieces[:, :, 16 * head_dim :].contiguous().view(torch.float32).transpose(1, 2)
        codes = pieces[:, :, : 16 * head_dim].contiguous()
        if zero:
            numbers = codes.view(-1, num_kv_heads, head_dim // 4, 16, 4).permute(0, 3, 1, 2, 4).float() - zero
        else:
            signed = codes.view(torch.int8).view(-1, num_kv_heads, 4, head_dim, 4)
            numbers = signed.permute(0, 2, 4, 1, 3).float()
        numbers = numbers.reshape(-1, 16, num_kv_heads, head_dim) * scales[..., None]
        found.append(numbers.view(num_blocks, block_size, num_kv_heads, head_dim))
    return found[0], found[1]
