"""ChainInputs: the model inputs of a proposal, made together: known tokens first, then each draft."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.model.attn_metadata import AttnMetadata
from engine.spec.device.progress import DraftRuns
from engine.worker.input_batch import InputBatch
from kernels.upload import upload


@dataclass(frozen=True, slots=True)
class ChainInputs:
    """R runs of known tokens, then one token per row for the first draft, the second, and so on.

    Nothing is computed after the last draft of a row. The drafts themselves are not known when this is made.
    """

    token_ids: Tensor  # [T] of the runs
    positions: Tensor  # [N] int64
    metadata: AttnMetadata
    last: Tensor  # indices of the last tokens of complete runs
    token_bounds: list[int]  # 0, T, the end of the first drafts, ..., N
    row_bounds: list[int]  # the same for rows
    starts: Tensor  # int32, 0, 1, 2, ...: `query_start_loc` of rows with one token

    @staticmethod
    def make(
        batch: InputBatch, runs: DraftRuns, rows: np.ndarray, lengths: np.ndarray, num_groups: int
    ) -> ChainInputs:
        """Make the inputs for the runs of P rows, whose known tokens are `lengths`.

        Args:
            num_groups: groups of layers of the drafter, which all use the blocks of the first group.
        """
        num_later = runs.wanted[runs.members] - 1
        number, member = np.nonzero(num_later > np.arange(num_later.max(initial=0))[:, None])
        member = runs.members[member]
        step = batch.make_input(
            np.concatenate((runs.rows, rows[member])),
            np.concatenate((runs.starts, lengths[member] + number)),
            np.concatenate((runs.counts, np.ones_like(member))),
        )
        num_runs, num_tokens = len(runs.rows), int(runs.counts.sum())
        ends = np.cumsum(np.bincount(number))
        device = step.positions.device
        return ChainInputs(
            step.input_ids[:num_tokens],
            step.positions,
            step.attn_metadata.use_first_group(num_groups),
            upload(step.last_token_index[:num_runs][runs.is_complete], device),
            [0, num_tokens, *(num_tokens + ends).tolist()],
            [0, num_runs, *(num_runs + ends).tolist()],
            torch.arange(len(runs.members) + 1, dtype=torch.int32, device=device),
        )

    def select(self, number: int) -> tuple[slice, AttnMetadata]:
        """Return the place among the N tokens, and the metadata, of the runs (0) or of a draft (1, 2, ...)."""
        first, end = self.row_bounds[number : number + 2]
        tokens = slice(*self.token_bounds[number : number + 2])
        each = self.metadata
        starts = self.starts[: end - first + 1] if number else each.query_start_loc[: end + 1]
        return tokens, AttnMetadata(
            each.slot_mapping[:, tokens], each.block_tables[:, first:end], starts, each.seq_lens[first:end],
            each.query_lens_list[first:end], each.seq_lens_list[first:end],
        )
