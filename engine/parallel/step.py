"""The inputs of a step as one tensor of integers, for the ranks that follow."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.model.attn_metadata import AttnMetadata


def pack_step(input_ids: Tensor, positions: Tensor, metadata: AttnMetadata) -> Tensor:
    """Return all integers of a step, [N] int64."""
    parts = (input_ids, positions, metadata.slot_mapping.reshape(-1), metadata.block_tables.reshape(-1))
    return torch.cat([*parts, metadata.query_start_loc, metadata.seq_lens])


def count_integers(query_lens: list[int], num_groups: int, num_columns: int) -> int:
    """Return the length of the tensor of `pack_step`."""
    num_rows = len(query_lens)
    return (2 + num_groups) * sum(query_lens) + num_groups * num_rows * num_columns + 2 * num_rows + 1


def unpack_step(
    flat: Tensor, query_lens: list[int], seq_lens: list[int], num_groups: int, num_columns: int
) -> tuple[Tensor, Tensor, AttnMetadata]:
    """Return the step's input ids, positions and metadata."""
    num_tokens, num_rows = sum(query_lens), len(query_lens)
    num_entries = num_groups * num_rows * num_columns
    sizes = [num_tokens, num_tokens, num_groups * num_tokens, num_entries, num_rows + 1, num_rows]
    input_ids, positions, slots, tables, starts, ends = flat.split(sizes)
    metadata = AttnMetadata(
        slot_mapping=slots.view(num_groups, num_tokens),
        block_tables=tables.view(num_groups, num_rows, num_columns).int(),
        query_start_loc=starts.int(),
        seq_lens=ends.int(),
        query_lens_list=query_lens,
        seq_lens_list=seq_lens,
    )
    return input_ids, positions, metadata
