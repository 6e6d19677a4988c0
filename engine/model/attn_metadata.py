"""AttnMetadata: positions of a step's tokens in the flattened batch and in the paged cache."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kernels.shared_prefixes import SharedPrefixes


@dataclass(frozen=True, slots=True)
class AttnMetadata:
    """Metadata of one step: R requests with T new tokens in total, request after request.

    Tensors are on the model's device. The lists are host copies of the lengths, so that the forward pass
    never copies from the device.
    """

    slot_mapping: Tensor  # [T] int64, block_id * block_size + offset, where each token's K and V go
    block_tables: Tensor  # [R, max_blocks] int32, padded with 0, the null block
    query_start_loc: Tensor  # [R + 1] int32, cumulative query lengths
    seq_lens: Tensor  # [R] int32, context length including this step's tokens
    query_lens_list: list[int]  # new tokens of each request, at least 1
    seq_lens_list: list[int]
    shared: SharedPrefixes | None = None  # groups of decodes that start with the same blocks
