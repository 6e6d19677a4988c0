"""Parts that both attention kernels share: one pass over keys with a running softmax, and the folding of parts.

Rows of a tile are queries times the heads of a group: row m is query m // GROUP, head m % GROUP, so that heads
which share their keys share the loads. Softmax is in base 2; the scale brings log2(e).
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.fp8 import decode_e4m3


@triton.jit
def load_queries(
    q_ptr: tl.tensor,
    q_stride: tl.tensor,
    first_token: tl.tensor,
    query: tl.tensor,
    head: tl.tensor,
    is_valid: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> tl.tensor:
    column = tl.arange(0, BLOCK_DIM)
    token = first_token + query.to(tl.int64)
    offsets = (token * q_stride + head * HEAD_DIM)[:, None] + column[None, :]
    mask = is_valid[:, None] & (column < HEAD_DIM)[None, :]
    return tl.load(q_ptr + offsets, mask=mask, other=0.0)


@triton.jit
def attend_keys(
    q: tl.tensor,
    query_position: tl.tensor,
    acc: tl.tensor,
    row_max: tl.tensor,
    row_sum: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    table_ptr: tl.tensor,
    kv_head: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    scale: tl.tensor,
    soft_cap: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    IS_FP8: tl.constexpr,
    IS_MASKED: tl.constexpr,
) -> tl.tensor:
    """Let the rows see keys [start, end) of one request; without IS_MASKED every row sees them all.

    Keys outside [start, end), and those behind the window of every row, are not loaded: a NaN in memory of others
    never arrives here.
    """
    LOG2_E: tl.constexpr = 1.4426950408889634
    SLOT_SIZE: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    column = tl.arange(0, BLOCK_DIM)
    if WINDOW > 0:
        first_seen = tl.min(query_position, axis=0) - WINDOW + 1
    for tile in range(start, end, BLOCK_N):
        key = tile + tl.arange(0, BLOCK_N)
        in_range = key < end
        if WINDOW > 0:
            in_range = in_range & (key >= first_seen)
        block = tl.load(table_ptr + key // BLOCK_SIZE, mask=in_range, other=0).to(tl.int64)
        slot = block * BLOCK_SIZE + key % BLOCK_SIZE
        offsets = (slot * SLOT_SIZE + kv_head * HEAD_DIM)[:, None] + column[None, :]
        mask = in_range[:, None]
        if HEAD_DIM != BLOCK_DIM:
            mask = mask & (column < HEAD_DIM)[None, :]
        k = tl.load(k_ptr + offsets, mask=mask, other=0)
        v = tl.load(v_ptr + offsets, mask=mask, other=0)
        if IS_FP8:
            k = decode_e4m3(k).to(q.dtype)
            v = decode_e4m3(v).to(q.dtype)
        products = tl.dot(q, tl.trans(k), input_precision="ieee")
        if HAS_SOFT_CAP:
            # soft_cap * tanh(x), as 1 - 2 / (e**2x + 1)
            grown = tl.exp2(products * (2.0 * LOG2_E * scale / soft_cap))
            scores = (soft_cap * LOG2_E) * (1.0 - 2.0 / (grown + 1.0))
        else:
            scores = products * (scale * LOG2_E)
        if IS_MASKED:
            is_seen = in_range[None, :] & (key[None, :] <= query_position[:, None])
            if WINDOW > 0:
                is_seen = is_seen & (key[None, :] > query_position[:, None] - WINDOW)
            scores = tl.where(is_seen, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        # A row that has seen nothing yet keeps a sum of 0 instead of a NaN.
        safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores - safe_max[:, None])
        decay = tl.exp2(row_max - safe_max)
        row_sum = row_sum * decay + tl.sum(weights, axis=1)
        acc = acc * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit
def start_rows(
    sinks_ptr: tl.tensor,
    head: tl.tensor,
    is_valid: tl.tensor,
    HAS_SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> tl.tensor:
    """Running maximum and sum of rows before their first key: those of their head's sink, if it has one."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    if HAS_SINKS:
        sinks = tl.load(sinks_ptr + head, mask=is_valid, other=0.0) * LOG2_E
        return sinks, tl.full([BLOCK_M], 1.0, dtype=tl.float32)
    return tl.full([BLOCK_M], float("-inf"), dtype=tl.float32), tl.zeros([BLOCK_M], dtype=tl.float32)


@triton.jit
def fold_part(
    total: tl.tensor,
    total_max: tl.tensor,
    total_sum: tl.tensor,
    acc: tl.tensor,
    row_max: tl.tensor,
    row_sum: tl.tensor,
) -> tl.tensor:
    """Add the next part of a context to those before it; the order of calls is the order of the sum."""
    new_max = tl.maximum(total_max, row_max)
    safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    old, new = tl.exp2(total_max - safe_max), tl.exp2(row_max - safe_max)
    return total * old[:, None] + acc * new[:, None], new_max, total_sum * old + row_sum * new


@triton.jit
def finish_rows(total: tl.tensor, total_sum: tl.tensor) -> tl.tensor:
    """Weighted sum over sum of weights; 0 for a row without keys."""
    return total / tl.where(total_sum == 0.0, 1.0, total_sum)[:, None]


@triton.jit
def split_context(
    first_query: tl.tensor,
    seq_len: tl.tensor,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
) -> tl.tensor:
    """Cut the keys that a query and its successors see: (first key, keys in a split, number of splits).

    A function of the request's own length, so that no other request changes the order of its sums.
    """
    first = tl.maximum(first_query - WINDOW + 1, 0) // BLOCK_N * BLOCK_N if WINDOW > 0 else 0
    num_keys = seq_len - first
    split_len = tl.maximum(tl.cdiv(tl.cdiv(num_keys, MAX_SPLITS), MIN_SPLIT), 1) * MIN_SPLIT
    return first, split_len, tl.cdiv(num_keys, split_len)
