"""ChainInputs: the model inputs of all drafts of a proposal, made together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from engine.model.attn_metadata import AttnMetadata
from engine.worker.input_batch import InputBatch


@dataclass(frozen=True, slots=True)
class ChainInputs:
    """One token of each row at position `number` of the chain, for all numbers one after the other.

    The tokens themselves are not known yet: each is drawn from the output of the one before.
    """

    positions: Tensor  # [N] int64
    metadata: AttnMetadata
    bounds: list[int]  # first token of each number, and N

    @staticmethod
    def make(batch: InputBatch, rows: np.ndarray, firsts: np.ndarray, counts: np.ndarray) -> ChainInputs:
        """Make the inputs of `counts` tokens of each row from position `firsts` on; a count may be 0."""
        numbers = np.arange(counts.max(initial=0))[:, None]
        number, member = np.nonzero(counts[None, :] > numbers)
        step = batch.make_input(rows[member], firsts[member] + number, np.ones_like(member))
        bounds = [0, *np.cumsum(np.bincount(number)).tolist()]
        return ChainInputs(step.positions, step.attn_metadata, bounds)

    def select(self, number: int) -> tuple[Tensor, AttnMetadata]:
        """Return the positions and the metadata of one number; its rows are those that have a token there."""
        start, end = self.bounds[number], self.bounds[number + 1]
        each = self.metadata
        return self.positions[start:end], AttnMetadata(
            each.slot_mapping[:, start:end],
            each.block_tables[:, start:end],
            each.query_start_loc[: end - start + 1],
            each.seq_lens[start:end],
            each.query_lens_list[start:end],
            each.seq_lens_list[start:end],
        )
