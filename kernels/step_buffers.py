"""StepBuffers: where the gathered inputs of a step lie."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """Where the inputs of a step go: T tokens and R requests, both padded; kept from step to step."""

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slot_mapping: Tensor  # [T] int64
    block_tables: Tensor  # [R, max_blocks] int32
    seq_lens: Tensor  # [R] int32
