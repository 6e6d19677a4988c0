"""LeaderDecoder: the model of rank 0, which makes the other ranks take part in each of its steps.

In a pipeline, rank 0 computes the first stage. The last stage returns the hidden states to it, and rank 0 goes on with
another step meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.model.adapters import StepAdapters
from engine.model.attn_metadata import AttnMetadata, StepImages
from engine.model.config import ModelConfig
from engine.model.decoder import DecoderModel
from engine.model.sharding import Sharding
from engine.parallel.adapters import list_segments
from engine.parallel.commands import Forward, Logits
from engine.parallel.ranks import Ranks
from engine.parallel.stage_link import Arrival
from engine.parallel.step import pack_step
from kernels import Ops
from kernels.ops import KVCache


@dataclass(frozen=True, slots=True)
class StagedHidden:
    """The final hidden states of a step that later stages compute; a `Fetch` without arrays."""

    hidden: Tensor  # [T, D or more], written when it has arrived
    arrival: Arrival
    ranks: Ranks

    def is_done(self) -> bool:
        return self.ranks.is_broken or self.arrival.is_done()

    @torch.inference_mode()
    def wait(self) -> list[np.ndarray]:
        self.ranks.check()
        return self.arrival.wait()


class LeaderDecoder(DecoderModel):
    """A decoder whose other ranks follow. They get the inputs of a step and of the output head, and decide nothing.

    Scheduling, sampling, grammars and drafts happen on rank 0 alone.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, ops: Ops | None,
        sharding: Sharding, ranks: Ranks,
    ) -> None:
        super().__init__(config, dtype, device, ops, sharding)
        self._ranks = ranks

    def forward(
        self, input_ids: Tensor, positions: Tensor, kv_caches: Sequence[KVCache], attn_metadata: AttnMetadata,
        adapters: StepAdapters | None = None, images: StepImages | None = None,
        received: Tensor | None = None,
    ) -> Tensor:
        """As `DecoderModel.forward`, on the ranks of one stage, without images."""
        with self._ranks.exchange(self._announce(attn_metadata, adapters)) as comm:
            if comm is not None:
                comm.broadcast(pack_step(input_ids, positions, attn_metadata, adapters))
            return super().forward(input_ids, positions, kv_caches, attn_metadata, adapters)

    def begin(
        self, input_ids: Tensor, positions: Tensor, kv_caches: Sequence[KVCache], metadata: AttnMetadata
    ) -> StagedHidden:
        """Compute the first stage and let the others follow."""
        integers = pack_step(input_ids, positions, metadata, None)
        with self._ranks.exchange(self._announce(metadata, None)) as comm:
            if comm is not None:
                comm.broadcast(integers)
            stream = super().forward(input_ids, positions, kv_caches, metadata)
            width = self.config.hidden_size * (1 + len(self.aux_layers))
            hidden = stream.new_empty(len(input_ids), width)
            return StagedHidden(hidden, self._ranks.pass_on(integers, stream, hidden), self._ranks)

    @property
    def has_stages(self) -> bool:
        """Whether steps are begun and their hidden states arrive later."""
        return len(self.layers) < self.config.num_hidden_layers

    def compute_logits(self, hidden: Tensor, adapters: StepAdapters | None = None) -> Tensor:
        """As `DecoderModel.compute_logits`, on the ranks of the first stage."""
        if self._sharding.comm is None:
            return super().compute_logits(hidden)
        final = hidden[:, : self.config.hidden_size].contiguous()
        with self._ranks.exchange(Logits(len(final), list_segments(adapters))):
            self._sharding.comm.broadcast(final)
            if adapters is not None:
                self._sharding.comm.broadcast(adapters.rows)
            return super().compute_logits(final, adapters)

    def _announce(self, metadata: AttnMetadata, adapters: StepAdapters | None) -> Forward:
        num_groups, _, num_columns = metadata.block_tables.shape
        query_lens, seq_lens = list(metadata.query_lens_list), list(metadata.seq_lens_list)
        segments = list_segments(adapters)
        return Forward(query_lens, seq_lens, num_groups, num_columns, segments, self.aux_layers)
