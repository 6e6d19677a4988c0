"""AttnMetadata: positions of a step's tokens in the flattened batch and in the paged cache."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from kernels.states import StateSegments


@dataclass(frozen=True, slots=True)
class AttnMetadata:
    """Metadata of one step: R requests with T new tokens in total, request after request; G groups of layers.

    Tensors are on the model's device. The lists are host copies of the lengths, so that the forward pass
    never copies from the device.
    """

    slot_mapping: Tensor  # [G, T] int64, block_id * block_size + offset, where each token's K and V go
    block_tables: Tensor  # [G, R, max_blocks] int32, padded with 0, the null block
    query_start_loc: Tensor  # [R + 1] int32, cumulative query lengths
    seq_lens: Tensor  # [R] int32, context length including this step's tokens
    query_lens_list: list[int]  # new tokens of each request, at least 1
    seq_lens_list: list[int]
    max_query_len: int = 0  # of a recorded step, which serves others, too; see `kernels.ops.MakePlan`
    states: StateSegments | None = None  # for models with state layers
    token_types: Tensor | None = None  # [T] int64, for encoders: 1 in the second text of a pair; None: all 0

    def use_first_group(self, num_groups: int) -> AttnMetadata:
        """Return metadata for a model of so many groups whose layers all use the blocks of the first group here."""
        return replace(
            self,
            slot_mapping=self.slot_mapping[:1].expand(num_groups, -1),
            block_tables=self.block_tables[:1].expand(num_groups, -1, -1),
        )


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """Tokens of an image that attend to each other, the last of which are in this step."""

    place: int  # of the first one in the step
    count: int  # those in the step
    row: int  # request of the step
    end: int  # position after the last one


@dataclass(frozen=True, slots=True)
class StepImages:
    """Features in the place of the embeddings of M tokens."""

    places: Tensor  # [M] int64, index of each token in the step
    features: Tensor  # [M, D * (1 + k)], dtype of the model: embeddings, and what k first layers add to their outputs
    spans: tuple[ImageSpan, ...] = ()
