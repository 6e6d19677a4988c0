"""The inputs of a step, gathered on the device in two launches; the twin of `kernels.ops.GatherInputs`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.step_buffers import StepBuffers
from kernels.triton.launch import FUSED, check_contiguous, check_rows, check_shape

BLOCK = 128


@triton.jit(do_not_specialize=["num_tokens", "num_requests", "slot_stride"])
def gather_tokens_kernel(
    input_ids_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    pool_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    query_start_ptr: tl.tensor,
    pool_stride: tl.tensor,
    group_stride: tl.tensor,
    table_stride: tl.tensor,
    slot_stride: tl.tensor,
    num_tokens: tl.tensor,
    num_requests: tl.tensor,
    NUM_GROUPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # Find the first request that ends after the token; every lane does its own binary search.
    low = tl.zeros([BLOCK], tl.int32)
    high = tl.zeros([BLOCK], tl.int32) + num_requests
    remaining = num_requests + 1
    while remaining > 1:
        middle = (low + high) // 2
        is_open = low < high
        end = tl.load(query_start_ptr + 1 + middle, mask=is_open, other=0)
        low = tl.where(is_open & (end <= token), middle + 1, low)
        high = tl.where(is_open & (end > token), middle, high)
        remaining = (remaining + 1) // 2
    is_owned = low < num_requests
    row = tl.load(rows_ptr + low, mask=is_owned, other=-1).to(tl.int64)
    is_real = is_owned & (row >= 0)
    start = tl.load(starts_ptr + low, mask=is_real, other=0).to(tl.int64)
    first = tl.load(query_start_ptr + low, mask=is_real, other=0)
    position = tl.where(is_real, start + token - first, 0)
    input_id = tl.load(pool_ptr + row * pool_stride + position, mask=is_real, other=0)
    mask = token < num_tokens
    tl.store(input_ids_ptr + token, input_id.to(tl.int64), mask=mask)
    tl.store(positions_ptr + token, position, mask=mask)
    for index in tl.static_range(NUM_GROUPS):
        group = tl.zeros([BLOCK], tl.int64) + index
        place = group * group_stride + row * table_stride + position // BLOCK_SIZE
        block = tl.load(tables_ptr + place, mask=is_real, other=0)
        slot = tl.where(is_real, block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE, 0)
        tl.store(slots_ptr + group * slot_stride + token, slot, mask=mask)


@triton.jit(do_not_specialize=["width", "out_stride", "row_stride"])
def gather_tables_kernel(
    out_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    query_start_ptr: tl.tensor,
    group_stride: tl.tensor,
    table_stride: tl.tensor,
    out_stride: tl.tensor,
    row_stride: tl.tensor,
    width: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    request, group = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows_ptr + request).to(tl.int64)
    mask = column < width
    is_known = column < tl.where(row >= 0, width, 0)
    blocks = tl.load(tables_ptr + group * group_stride + row * table_stride + column, mask=is_known, other=0)
    tl.store(out_ptr + group * out_stride + request * row_stride + column, blocks, mask=mask)
    start = tl.load(starts_ptr + request)
    query_len = tl.load(query_start_ptr + request + 1) - tl.load(query_start_ptr + request)
    tl.store(seq_lens_ptr + request, tl.where(row >= 0, start + query_len, 1).to(tl.int32))


def gather_inputs(
    token_pool: Tensor,
    block_tables: Tensor,
    rows: Tensor,
    starts: Tensor,
    query_start_loc: Tensor,
    block_size: int,
    out: StepBuffers,
) -> None:
    """Fill the buffers of a step; see `kernels.ops.GatherInputs`."""
    num_tokens, num_requests = out.input_ids.shape[0], rows.shape[0]
    num_groups, width = block_tables.shape[0], out.block_tables.shape[2]
    for name in ("input_ids", "positions", "seq_lens"):
        check_contiguous(name, getattr(out, name))
    # Between groups there may be a gap, and between tables.
    check_contiguous("slot_mapping[0]", out.slot_mapping[0])
    check_rows("block_tables[0]", out.block_tables[0])
    check_shape("positions", out.positions, (num_tokens,))
    check_shape("slot_mapping", out.slot_mapping, (num_groups, num_tokens))
    check_shape("block_tables", out.block_tables, (num_groups, num_requests, width))
    check_shape("seq_lens", out.seq_lens, (num_requests,))
    check_shape("query_start_loc", query_start_loc, (num_requests + 1,))
    if width > block_tables.shape[2]:
        raise ValueError(f"out.block_tables has {width} columns, more than {block_tables.shape[2]}")
    if num_tokens:
        gather_tokens_kernel[(triton.cdiv(num_tokens, BLOCK),)](
            out.input_ids,
            out.positions,
            out.slot_mapping,
            token_pool,
            block_tables,
            rows,
            starts,
            query_start_loc,
            token_pool.stride(0),
            block_tables.stride(0),
            block_tables.stride(1),
            out.slot_mapping.stride(0),
            num_tokens,
            num_requests,
            NUM_GROUPS=num_groups,
            BLOCK_SIZE=block_size,
            BLOCK=BLOCK,
            num_warps=4,
            **FUSED,
        )
    if num_requests:
        gather_tables_kernel[(triton.cdiv(max(1, width), BLOCK), num_requests, num_groups)](
            out.block_tables,
            out.seq_lens,
            block_tables,
            rows,
            starts,
            query_start_loc,
            block_tables.stride(0),
            block_tables.stride(1),
            out.block_tables.stride(0),
            out.block_tables.stride(1),
            width,
            BLOCK=BLOCK,
            num_warps=4,
            **FUSED,
        )
