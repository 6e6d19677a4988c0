"""The inputs of a step, gathered where the tokens are: nothing a step needs waits for the host to read a token."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.device_kernels import find_device_kernels
from kernels.step_buffers import StepBuffers


def gather_inputs(
    token_pool: Tensor,
    block_tables: Tensor,
    rows: Tensor,
    starts: Tensor,
    query_start_loc: Tensor,
    block_size: int,
    out: StepBuffers,
) -> None:
    """Fill the buffers of a step from what is kept about each row of the batch.

    Args:
        token_pool: [num_rows, max_len] int64, the tokens of every row by position.
        block_tables: [num_groups, num_rows, max_blocks] int32, the blocks of every row.
        rows: [R] int64, the row of each request of the step; -1 only pads.
        starts: [R] int64, position of each request's first new token.
        query_start_loc: [R + 1] int32, cumulative query lengths; a request that pads may have one token or none.
        block_size: tokens in a block.
        out: overwritten. Tokens that pad, of such a request or behind the last one, get token, position and slot
            0, which lies in the null block; requests that pad get a context of one token in the null block.
    """
    device = token_pool.device
    kernels = find_device_kernels(device.type, "gather_inputs")
    if kernels is not None:
        kernels.gather_inputs(token_pool, block_tables, rows, starts, query_start_loc, block_size, out)
        return
    num_tokens, num_requests = out.input_ids.shape[0], len(rows)
    token = torch.arange(num_tokens, device=device)
    request = torch.searchsorted(query_start_loc[1:].long(), token, right=True)
    is_real = request < num_requests
    request = request.clamp(max=num_requests - 1)
    row = rows[request]
    is_real &= row >= 0
    row = row.clamp(min=0)
    position = (starts[request] + token - query_start_loc[request]).where(is_real, 0)
    block = block_tables[:, row, position.div(block_size, rounding_mode="floor")].long()
    out.positions.copy_(position)
    out.input_ids.copy_(token_pool[row, position].where(is_real, 0))
    out.slot_mapping.copy_((block * block_size + position % block_size).where(is_real, 0))
    is_used = rows >= 0
    width = out.block_tables.shape[2]
    tables = block_tables[:, rows.clamp(min=0), :width]
    out.block_tables.copy_(tables.where(is_used.unsqueeze(1), 0))
    out.seq_lens.copy_((starts + query_start_loc.diff()).where(is_used, 1))
