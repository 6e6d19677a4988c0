"""LeaderDecoder: the model of rank 0, which makes the other ranks take part in each of its steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.model.adapters import StepAdapters
from engine.model.attn_metadata import AttnMetadata
from engine.model.config import ModelConfig
from engine.model.decoder import DecoderModel
from engine.model.sharding import Sharding
from engine.model.vision.step_images import StepImages
from engine.parallel.adapters import list_segments
from engine.parallel.commands import Forward, Logits
from engine.parallel.ranks import Ranks
from engine.parallel.step import pack_step
from kernels import Ops
from kernels.ops import KVCache


class LeaderDecoder(DecoderModel):
    """A decoder whose other ranks follow. They get the inputs of a step and of the output head, and decide nothing.

    Scheduling, sampling, grammars and drafts happen on rank 0 alone.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        ops: Ops | None,
        sharding: Sharding,
        ranks: Ranks,
    ) -> None:
        super().__init__(config, dtype, device, ops, sharding)
        self._ranks = ranks

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: Sequence[KVCache],
        attn_metadata: AttnMetadata,
        adapters: StepAdapters | None = None,
        images: StepImages | None = None,
    ) -> Tensor:
        """As `DecoderModel.forward`, on all ranks, without images."""
        metadata = attn_metadata
        num_groups, _, num_columns = metadata.block_tables.shape
        command = Forward(
            list(metadata.query_lens_list),
            list(metadata.seq_lens_list),
            num_groups,
            num_columns,
            list_segments(adapters),
        )
        with self._ranks.exchange(command) as comm:
            comm.broadcast(pack_step(input_ids, positions, metadata, adapters))
            return super().forward(input_ids, positions, kv_caches, metadata, adapters)

    def compute_logits(self, hidden: Tensor, adapters: StepAdapters | None = None) -> Tensor:
        """As `DecoderModel.compute_logits`, on all ranks."""
        final = hidden[:, : self.config.hidden_size].contiguous()
        with self._ranks.exchange(Logits(len(final), list_segments(adapters))) as comm:
            comm.broadcast(final)
            if adapters is not None:
                comm.broadcast(adapters.rows)
            return super().compute_logits(final, adapters)
