"""Attention of requests with many new tokens (prefill and its chunks): one program a tile of queries and KV head.

The grid is an upper bound made of padded shapes, num_tokens // BLOCK_Q + num_requests tiles; each program finds
its request by binary search over the query starts, so that no query length is read on the host. Tiles and heads are
one axis: only the first of a grid may be longer than 65,535.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.attention_core import attend_keys, finish_rows, load_queries, start_rows


@triton.jit
def find_request(
    query_start_ptr: tl.tensor, num_requests: tl.tensor, tile: tl.tensor, BLOCK_Q: tl.constexpr
) -> tl.tensor:
    """The last request whose tiles start at or before this one; request r's start at start // BLOCK_Q + r."""
    low, high = 0, num_requests
    while low < high:
        middle = (low + high) // 2
        first_tile = tl.load(query_start_ptr + middle) // BLOCK_Q + middle
        if first_tile <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit(do_not_specialize=["num_requests", "table_stride"])
def long_attention_kernel(
    out_ptr: tl.tensor,
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    query_start_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    q_stride: tl.tensor,
    table_stride: tl.tensor,
    num_requests: tl.tensor,
    scale: tl.tensor,
    soft_cap: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_FP8: tl.constexpr,
    SHORT_LIMIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    # Later tiles see more keys: start them first.
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // NUM_KV_HEADS
    request = find_request(query_start_ptr, num_requests, tile, BLOCK_Q)
    first_token = tl.load(query_start_ptr + request).to(tl.int64)
    query_len = (tl.load(query_start_ptr + request + 1) - first_token).to(tl.int32)
    first_query = (tile - request - first_token // BLOCK_Q).to(tl.int32) * BLOCK_Q
    if (query_len <= SHORT_LIMIT) | (first_query >= query_len):
        return
    seq_len = tl.load(seq_lens_ptr + request)
    context_len = seq_len - query_len
    row = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_DIM)
    query = first_query + row // GROUP
    head = kv_head * GROUP + row % GROUP
    is_valid = (row < BLOCK_Q * GROUP) & (query < query_len)
    q = load_queries(q_ptr, q_stride, first_token, query, head, is_valid, HEAD_DIM, BLOCK_DIM)
    table_ptr = tables_ptr + request.to(tl.int64) * table_stride

    # Keys [start, masked) are seen by every row, [masked, end) by some.
    first_position = context_len + first_query
    end = tl.minimum(first_position + BLOCK_Q, seq_len)
    start, masked = 0, (first_position + 1) // BLOCK_N * BLOCK_N
    if WINDOW > 0:
        start = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        masked = start
    acc = tl.zeros([BLOCK_M, BLOCK_DIM], dtype=tl.float32)
    row_max, row_sum = start_rows(sinks_ptr, head, is_valid, HAS_SINKS, BLOCK_M)
    for phase in tl.static_range(2):
        acc, row_max, row_sum = attend_keys(
            q,
            context_len + query,
            acc,
            row_max,
            row_sum,
            k_ptr,
            v_ptr,
            table_ptr,
            kv_head,
            start if phase == 0 else masked,
            masked if phase == 0 else end,
            scale,
            soft_cap,
            NUM_KV_HEADS,
            HEAD_DIM,
            BLOCK_DIM,
            BLOCK_SIZE,
            BLOCK_N,
            WINDOW,
            HAS_SOFT_CAP,
            IS_FP8,
            phase == 1,
        )
    offsets = ((first_token + query) * NUM_HEADS + head)[:, None] * HEAD_DIM + column[None, :]
    mask = is_valid[:, None] & (column < HEAD_DIM)[None, :]
    tl.store(out_ptr + offsets, finish_rows(acc, row_sum).to(out_ptr.dtype.element_ty), mask=mask)
