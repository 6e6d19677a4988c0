"""StepBuffers: the memory for the gathered inputs of a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Groups start at multiples of 16 bytes: Triton compiles another kernel for a pointer that is not aligned to that.
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """Buffers for the inputs of a step: T tokens and R requests, both padded; G groups of layers."""

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slot_mapping: Tensor  # [G, T] int64
    block_tables: Tensor  # [G, R, max_blocks] int32
    seq_lens: Tensor  # [R] int32


def make_slot_mapping(num_groups: int, num_tokens: int, device: torch.device) -> Tensor:
    """Return uninitialised memory [num_groups, num_tokens] int64 with aligned groups."""
    return _make_aligned(num_groups, num_tokens, torch.int64, device)


def make_block_tables(num_groups: int, num_rows: int, max_blocks: int, device: torch.device) -> Tensor:
    """Return uninitialised memory [num_groups, num_rows, max_blocks] int32 with aligned groups."""
    flat = _make_aligned(num_groups, num_rows * max_blocks, torch.int32, device)
    return flat.unflatten(1, (num_rows, max_blocks))


def _make_aligned(num_groups: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    step = _ALIGNMENT // dtype.itemsize
    width = size if num_groups == 1 else -(-size // step) * step
    return torch.empty(num_groups, width, dtype=dtype, device=device)[:, :size]
