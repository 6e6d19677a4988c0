"""The inputs of a step as one tensor of integers, for the ranks that follow."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.model.adapters import StepAdapters
from engine.model.attn_metadata import AttnMetadata
from engine.parallel.commands import Forward, Segment


def pack_step(
    input_ids: Tensor, positions: Tensor, metadata: AttnMetadata, adapters: StepAdapters | None
) -> Tensor:
    """Return all integers of a step, [N] int64."""
    parts = (input_ids, positions, metadata.slot_mapping.reshape(-1), metadata.block_tables.reshape(-1))
    rows = [] if adapters is None else [adapters.rows]
    return torch.cat([*parts, metadata.query_start_loc, metadata.seq_lens, *rows])


def list_sizes(step: Forward) -> list[int]:
    """Return the lengths of the parts of the tensor of `pack_step`."""
    num_tokens, num_rows = sum(step.query_lens), len(step.query_lens)
    sizes = [
        num_tokens, num_tokens, step.num_groups * num_tokens, step.num_groups * num_rows * step.num_columns,
    ]
    return [*sizes, num_rows + 1, num_rows, count_rows(step.adapters)]


def count_rows(adapters: list[Segment]) -> int:
    return adapters[-1][2] if adapters else 0


def unpack_step(flat: Tensor, step: Forward) -> tuple[Tensor, Tensor, AttnMetadata, Tensor]:
    """Return the step's input ids, positions, metadata, and rows that use adapters."""
    num_tokens, num_rows = sum(step.query_lens), len(step.query_lens)
    input_ids, positions, slots, tables, starts, ends, rows = flat.split(list_sizes(step))
    metadata = AttnMetadata(
        slot_mapping=slots.view(step.num_groups, num_tokens),
        block_tables=tables.view(step.num_groups, num_rows, step.num_columns).int(),
        query_start_loc=starts.int(), seq_lens=ends.int(), query_lens_list=step.query_lens,
        seq_lens_list=step.seq_lens,
    )
    return input_ids, positions, metadata, rows
