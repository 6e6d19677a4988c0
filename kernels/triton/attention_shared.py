"""The keys that several decoding requests share, attended once for all of them: the first half of cascade attention.

    program (KV head, tile of a group's members, p):  split p of the context that they have in common

It computes splits that the members would have computed alone, between the same borders and with tiles of the same
shape, and leaves them in the scratch where `short_attention_kernel` takes them up. Sums are those of the plain path
bit for bit; only the loads are fewer.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.attention_core import attend_keys, load_queries, split_context
from kernels.triton.attention_long import find_request


@triton.jit
def count_shared_splits(
    request: tl.tensor,
    seq_len: tl.tensor,
    is_request: tl.tensor,
    seq_lens_ptr: tl.tensor,
    leaders_ptr: tl.tensor,
    shared_lens_ptr: tl.tensor,
    BLOCK_N: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
) -> tl.tensor:
    """Leading splits of a context that others compute: all its shared ones, if it is cut as its leader's is."""
    leader = tl.load(leaders_ptr + request, mask=is_request, other=-1)
    is_member = leader >= 0
    leader_len = tl.load(seq_lens_ptr + leader, mask=is_member, other=1)
    shared_len = tl.load(shared_lens_ptr + request, mask=is_member, other=0)
    _, split_len, num_splits = split_context(0, seq_len, 0, BLOCK_N, MIN_SPLIT, MAX_SPLITS)
    _, leader_split_len, _ = split_context(0, leader_len, 0, BLOCK_N, MIN_SPLIT, MAX_SPLITS)
    return tl.where(split_len == leader_split_len, tl.minimum(shared_len // split_len, num_splits), 0)


@triton.jit(do_not_specialize=["table_stride", "num_groups", "num_slots"])
def shared_prefix_kernel(
    parts_ptr: tl.tensor,
    stats_ptr: tl.tensor,
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    query_start_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    leaders_ptr: tl.tensor,
    shared_lens_ptr: tl.tensor,
    members_ptr: tl.tensor,
    group_start_ptr: tl.tensor,
    q_stride: tl.tensor,
    table_stride: tl.tensor,
    num_groups: tl.tensor,
    num_slots: tl.tensor,
    scale: tl.tensor,
    soft_cap: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    IS_FP8: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(0)
    group = find_request(group_start_ptr, num_groups, tl.program_id(1), BLOCK_Q)
    start = tl.load(group_start_ptr + group)
    num_members = tl.load(group_start_ptr + group + 1) - start
    first = (tl.program_id(1) - group - start // BLOCK_Q) * BLOCK_Q
    if first >= num_members:
        return
    row = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_DIM)
    member = first + row // GROUP
    head = kv_head * GROUP + row % GROUP
    is_valid = (row < BLOCK_Q * GROUP) & (member < num_members)
    request = tl.load(members_ptr + start + member, mask=is_valid, other=0)
    token = tl.load(query_start_ptr + request, mask=is_valid, other=0)
    end_token = tl.load(query_start_ptr + request + 1, mask=is_valid, other=0)
    is_valid = is_valid & (end_token == token + 1)
    q = load_queries(
        q_ptr, q_stride, token.to(tl.int64), tl.zeros_like(row), head, is_valid, HEAD_DIM, BLOCK_DIM
    )
    seq_len = tl.load(seq_lens_ptr + request, mask=is_valid, other=1)
    num_shared = count_shared_splits(
        request, seq_len, is_valid, seq_lens_ptr, leaders_ptr, shared_lens_ptr, BLOCK_N, MIN_SPLIT, MAX_SPLITS
    )
    leader = tl.load(members_ptr + start)
    _, split_len, _ = split_context(0, tl.load(seq_lens_ptr + leader), 0, BLOCK_N, MIN_SPLIT, MAX_SPLITS)
    table_ptr = tables_ptr + leader.to(tl.int64) * table_stride
    slot = request.to(tl.int64) * NUM_HEADS + head
    for split in range(tl.program_id(2), tl.max(num_shared, axis=0), tl.num_programs(2)):
        acc, row_max, row_sum = attend_keys(
            q,
            seq_len - 1,
            tl.zeros([BLOCK_M, BLOCK_DIM], dtype=tl.float32),
            tl.full([BLOCK_M], float("-inf"), dtype=tl.float32),
            tl.zeros([BLOCK_M], dtype=tl.float32),
            k_ptr,
            v_ptr,
            table_ptr,
            kv_head,
            split * split_len,
            (split + 1) * split_len,
            scale,
            soft_cap,
            NUM_KV_HEADS,
            HEAD_DIM,
            BLOCK_DIM,
            BLOCK_SIZE,
            BLOCK_N,
            0,
            HAS_SOFT_CAP,
            IS_FP8,
            True,
        )
        is_kept = is_valid & (split < num_shared)
        part = slot * num_slots + split
        mask = is_kept[:, None] & (column < HEAD_DIM)[None, :]
        tl.store(parts_ptr + part[:, None] * HEAD_DIM + column[None, :], acc, mask=mask)
        tl.store(stats_ptr + part * 2, row_max, mask=is_kept)
        tl.store(stats_ptr + part * 2 + 1, row_sum, mask=is_kept)
