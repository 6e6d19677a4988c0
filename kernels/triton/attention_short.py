"""Attention of requests with few new tokens (decode, verification of drafts): long contexts, split over programs.

    program (KV head, request and its tile of queries, p):  splits p, p + P, p + 2P, ... of the context
        P = 1: folds its splits and writes the result
        P > 1: writes each split to scratch; `fold_splits_kernel` folds them in the same order

    scratch of decodes  [request, head, slot of a split]
    scratch of drafts   [token behind the first draft's first, head, slot]: other requests of the step take no room

How a context is cut depends on its own length alone; P only says who computes which part. Decodes and drafts are
launched apart, so that the tile of a decode does not depend on the drafts beside it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.attention_core import (
    attend_keys,
    finish_rows,
    fold_part,
    load_queries,
    split_context,
    start_rows,
)


@triton.jit
def find_first_row(
    request: tl.tensor, first_token: tl.tensor, first_draft: tl.tensor, MAX_QUERY: tl.constexpr
) -> tl.tensor:
    """The row of the scratch where a request's first query has its parts."""
    if MAX_QUERY == 1:
        return request.to(tl.int64)
    return first_token - first_draft


@triton.jit(do_not_specialize=["query_tiles", "first_draft", "table_stride", "num_slots"])
def short_attention_kernel(
    out_ptr: tl.tensor,
    parts_ptr: tl.tensor,
    stats_ptr: tl.tensor,
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    query_start_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    q_stride: tl.tensor,
    table_stride: tl.tensor,
    query_tiles: tl.tensor,
    first_draft: tl.tensor,
    num_slots: tl.tensor,
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
    MIN_QUERY: tl.constexpr,
    MAX_QUERY: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    IS_FOLDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    request = tl.program_id(0) // NUM_KV_HEADS // query_tiles
    query_tile = tl.program_id(0) // NUM_KV_HEADS % query_tiles
    first_token = tl.load(query_start_ptr + request).to(tl.int64)
    query_len = (tl.load(query_start_ptr + request + 1) - first_token).to(tl.int32)
    if (query_len < MIN_QUERY) | (query_len > MAX_QUERY) | (query_tile * BLOCK_Q >= query_len):
        return
    seq_len = tl.load(seq_lens_ptr + request)
    context_len = seq_len - query_len
    row = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_DIM)
    query = query_tile * BLOCK_Q + row // GROUP
    head = kv_head * GROUP + row % GROUP
    is_valid = (row < BLOCK_Q * GROUP) & (query < query_len)
    q = load_queries(q_ptr, q_stride, first_token, query, head, is_valid, HEAD_DIM, BLOCK_DIM)
    table_ptr = tables_ptr + request.to(tl.int64) * table_stride
    first, split_len, num_splits = split_context(
        context_len + query_tile * BLOCK_Q, seq_len, WINDOW, BLOCK_N, MIN_SPLIT, MAX_SPLITS
    )

    total = tl.zeros([BLOCK_M, BLOCK_DIM], dtype=tl.float32)
    total_max, total_sum = start_rows(sinks_ptr, head, is_valid, HAS_SINKS, BLOCK_M)
    slot = (find_first_row(request, first_token, first_draft, MAX_QUERY) + query) * NUM_HEADS + head
    mask = is_valid[:, None] & (column < HEAD_DIM)[None, :]
    for split in range(tl.program_id(1), num_splits, tl.num_programs(1)):
        start = first + split * split_len
        acc, row_max, row_sum = attend_keys(
            q,
            context_len + query,
            tl.zeros([BLOCK_M, BLOCK_DIM], dtype=tl.float32),
            tl.full([BLOCK_M], float("-inf"), dtype=tl.float32),
            tl.zeros([BLOCK_M], dtype=tl.float32),
            k_ptr,
            v_ptr,
            table_ptr,
            kv_head,
            start,
            tl.minimum(start + split_len, seq_len),
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
            True,
        )
        if IS_FOLDED:
            total, total_max, total_sum = fold_part(total, total_max, total_sum, acc, row_max, row_sum)
        else:
            part = slot * num_slots + split
            tl.store(parts_ptr + part[:, None] * HEAD_DIM + column[None, :], acc, mask=mask)
            tl.store(stats_ptr + part * 2, row_max, mask=is_valid)
            tl.store(stats_ptr + part * 2 + 1, row_sum, mask=is_valid)
    if IS_FOLDED:
        token = first_token + query.to(tl.int64)
        offsets = (token * NUM_HEADS + head)[:, None] * HEAD_DIM + column[None, :]
        result = finish_rows(total, total_sum)
        tl.store(out_ptr + offsets, result.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["max_query_len", "first_draft", "num_slots"])
def fold_splits_kernel(
    out_ptr: tl.tensor,
    parts_ptr: tl.tensor,
    stats_ptr: tl.tensor,
    query_start_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    max_query_len: tl.tensor,
    first_draft: tl.tensor,
    num_slots: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    WINDOW: tl.constexpr,
    MIN_QUERY: tl.constexpr,
    MAX_QUERY: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    head = tl.program_id(0) % NUM_HEADS
    request = tl.program_id(0) // NUM_HEADS // max_query_len
    query = tl.program_id(0) // NUM_HEADS % max_query_len
    first_token = tl.load(query_start_ptr + request).to(tl.int64)
    query_len = (tl.load(query_start_ptr + request + 1) - first_token).to(tl.int32)
    if (query_len < MIN_QUERY) | (query_len > MAX_QUERY) | (query >= query_len):
        return
    seq_len = tl.load(seq_lens_ptr + request)
    first_query = seq_len - query_len + query // BLOCK_Q * BLOCK_Q
    _, _, num_splits = split_context(first_query, seq_len, WINDOW, BLOCK_N, MIN_SPLIT, MAX_SPLITS)
    column = tl.arange(0, BLOCK_DIM)[None, :]
    mask = column < HEAD_DIM
    slot = (find_first_row(request, first_token, first_draft, MAX_QUERY) + query) * NUM_HEADS + head
    total = tl.zeros([1, BLOCK_DIM], dtype=tl.float32)
    one = tl.arange(0, 1)
    total_max, total_sum = start_rows(sinks_ptr, head + one, one == 0, HAS_SINKS, 1)
    # Unrolled, so that the loads of all parts are on their way at once; a part that is not there changes no bit.
    for split in tl.static_range(MAX_SPLITS):
        part = slot * num_slots + split + tl.arange(0, 1)
        is_there = split + tl.arange(0, 1) < num_splits
        acc = tl.load(parts_ptr + part[:, None] * HEAD_DIM + column, mask=mask & is_there[:, None], other=0.0)
        row_max = tl.load(stats_ptr + part * 2, mask=is_there, other=float("-inf"))
        row_sum = tl.load(stats_ptr + part * 2 + 1, mask=is_there, other=0.0)
        total, total_max, total_sum = fold_part(total, total_max, total_sum, acc, row_max, row_sum)
    offsets = ((first_token + query) * NUM_HEADS + head) * HEAD_DIM + column
    tl.store(out_ptr + offsets, finish_rows(total, total_sum).to(out_ptr.dtype.element_ty), mask=mask)
