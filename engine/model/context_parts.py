"""ContextPart: attention of one rank in a step, if several ranks divide the keys of each request.

    position of a token    0 1 2 3 4 5 6 7 ...       rank r of N holds the positions r, r + N, r + 2 N, ...
    rank 0                 0   2   4   6             in its N-th part of each block
    rank 1                   1   3   5   7

A query sees one key more than the query before it, and that key is on the next rank. So the queries p, p + N, p + 2 N,
... of a request each see one key more on every rank: they are an ordinary causal run. A chunk of a prompt becomes up to
N runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.model.attn_metadata import AttnMetadata
from engine.model.layer_spec import LayerSpec
from engine.model.sharding import Sharding
from kernels import Ops
from kernels.ops import KVCache, Plan


@dataclass(frozen=True, slots=True)
class ContextPart:
    """The keys that this rank writes and reads in one step.

    Attributes:
        slot_mapping: [T] int64 slots for this step's keys; keys of other ranks go to the null block.
        block_tables: [runs, max_blocks] int32.
        places: [Q] int64 indices of the tokens that see keys of this rank, run after run.
        plan: how those tokens are attended.
    """

    slot_mapping: Tensor
    block_tables: Tensor
    places: Tensor
    plan: Plan

    def attend(self, ops: Ops, q: Tensor, kv_cache: KVCache, spec: LayerSpec, sharding: Sharding) -> Tensor:
        """Attend the queries of this rank's heads over the keys of all ranks; [T, heads, head_size] both."""
        comm, attend = sharding.comm, ops.partial_attention
        assert comm is not None and attend is not None, "several ranks have ops for this"
        size, first = sharding.context_size, sharding.rank - sharding.context_rank
        num_tokens, num_heads, head_size = q.shape
        counts = [num_tokens] * comm.size
        # Every rank attends the queries of all ranks over its own keys.
        collected = comm.collect(q.flatten(1).float(), counts).view(comm.size, *q.shape)
        queries = collected[first : first + size].transpose(0, 1).flatten(1, 2).to(q.dtype)
        part = torch.zeros(num_tokens, size * num_heads, head_size + 1, device=q.device)
        part[..., head_size] = -torch.inf
        if len(self.places):
            attended, log_sums = attend(
                queries[self.places], *kv_cache, scale=spec.scale, soft_cap=spec.soft_cap, plan=self.plan
            )
            part[self.places] = torch.cat((attended.float(), log_sums.unsqueeze(-1)), dim=-1)
        parts = comm.collect(part.flatten(1), counts).view(comm.size, num_tokens, size, num_heads, -1)
        return merge_parts(parts[first : first + size, :, sharding.context_rank]).to(q.dtype)


def divide_context(ops: Ops, metadata: AttnMetadata, block_size: int, sharding: Sharding) -> ContextPart:
    """Return the part of this rank, whose blocks have `block_size` slots each."""
    rank, size, device = sharding.context_rank, sharding.context_size, metadata.slot_mapping.device
    places: list[np.ndarray] = []
    rows: list[int] = []
    query_lens: list[int] = []
    seq_lens: list[int] = []
    token = 0
    for row, (query_len, seq_len) in enumerate(
        zip(metadata.query_lens_list, metadata.seq_lens_list, strict=True)
    ):
        position = seq_len - query_len
        for offset in range(min(size, query_len)):
            # A position before the rank's first key sees none of its keys.
            start = offset if position + offset >= rank else offset + size
            run = np.arange(start, query_len, size)
            if len(run):
                places.append(token + run)
                rows.append(row)
                query_lens.append(len(run))
                seq_lens.append((position + int(run[-1]) - rank) // size + 1)
        token += query_len
    slots = metadata.slot_mapping[0]
    block_tables = metadata.block_tables[0].index_select(
        0, torch.tensor(rows, dtype=torch.int64, device=device)
    )
    bounds = torch.tensor([0, *np.cumsum(query_lens).tolist()], dtype=torch.int32, device=device)
    lengths = torch.tensor(seq_lens, dtype=torch.int32, device=device)
    return ContextPart(
        torch.where(slots % size == rank, slots // size, 0),
        block_tables,
        torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.int64), *places])).to(device),
        ops.make_plan(block_tables, bounds, lengths, query_lens, seq_lens, block_size),
    )


def merge_parts(parts: Tensor) -> Tensor:
    """Merge attention over parts of the keys, in the order of the parts.

    Args:
        parts: [N, ..., D + 1] float32. The first D values are the result over one part, the last one is the logarithm
            of its sum of exponentials, or -inf for a part without keys. At least one part has keys.

    Returns attention over all keys, [..., D] float32.
    """
    results, log_sums = parts[..., :-1], parts[..., -1:]
    weights = (log_sums - log_sums.amax(dim=0)).exp()
    merged, total = weights[0] * results[0], weights[0]
    for weight, result in zip(weights[1:], results[1:], strict=True):
        merged, total = merged + weight * result, total + weight
    return merged / total


def estimate_exchange(num_tokens: int, num_heads: int, head_size: int, context_size: int) -> int:
    """Return the bytes of memory in which a rank exchanges the queries and results of one layer."""
    return num_tokens * num_heads * (head_size + 1) * torch.float32.itemsize * (4 + 2 * context_size)
