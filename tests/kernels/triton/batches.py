"""Paged batches on the device of a test: shuffled pages, NaN in every slot that belongs to no request."""

import torch
from torch import Tensor

from tests.kernels.paged import make_batch

Tensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
# Absolute and relative, for sums of some hundred values near 1.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def make_paged(lens: list[tuple[int, int]], device: torch.device, **options: object) -> Tensors:
    """`make_batch` on a device, with unused entries of the block tables pointing at a block full of NaN."""
    # One key head: the interpreter's cost is per program.
    batch = make_batch(lens, **({"num_heads": 2, "num_kv_heads": 1} | options))  # type: ignore[arg-type]
    tables = batch.block_tables.clone()
    block_size = batch.k_cache.shape[1]
    for request, (_, seq_len) in enumerate(lens):
        tables[request, -(-seq_len // block_size) :] = 0
    q, k_cache, v_cache, _, query_start_loc, seq_lens = batch.tensors
    return tuple(  # type: ignore[return-value]
        each.to(device) for each in (q, k_cache, v_cache, tables, query_start_loc, seq_lens)
    )
