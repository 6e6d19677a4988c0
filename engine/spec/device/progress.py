"""DraftProgress: for how many tokens of each row the drafter's keys and values are in its cache."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from engine.core.actor_messages import StepPlan
from engine.spec.device.drafter import MAX_CATCH_UP
from engine.worker.input_batch import InputBatch


@dataclass(frozen=True, slots=True)
class DraftRuns:
    """Tokens that the drafter computes before its first draft: R runs, for P rows that want drafts."""

    rows: np.ndarray  # [R]
    starts: np.ndarray  # [R]
    counts: np.ndarray  # [R], at least 1
    is_complete: np.ndarray  # [R] bool: the run reaches the row's last token, and the row gets drafts
    members: np.ndarray  # indices of the complete rows among the P
    wanted: np.ndarray  # [P], as many as there are slots for

    def skip(self, num_skipped: np.ndarray) -> DraftRuns:
        """Return the runs without some of their first tokens; [R]."""
        counts = self.counts - num_skipped
        is_left = counts > 0
        starts = self.starts + num_skipped
        return replace(
            self, rows=self.rows[is_left], starts=starts[is_left], counts=counts[is_left],
            is_complete=self.is_complete[is_left],
        )


class DraftProgress:
    """The drafter's `num_computed_tokens`, which may be behind the target's.

    Only blocks of the first group of layers contain what the drafter writes. Blocks found in the prefix cache keep what
    it wrote for an earlier request, as far as it got there.

    Attributes:
        num_computed: [max_num_seqs] int64.
        num_slots: [max_num_seqs] int64, tokens that fit into the row's blocks.
    """

    def __init__(self, batch: InputBatch, num_blocks: int) -> None:
        self.num_computed = np.zeros(batch.max_num_seqs, dtype=np.int64)
        self.num_slots = np.zeros(batch.max_num_seqs, dtype=np.int64)
        self._block_size = batch.block_size
        self._num_groups = batch.num_groups
        self._num_written = np.zeros(num_blocks, dtype=np.int64)  # leading slots of each block
        self._blocks: dict[int, list[int]] = {}

    def apply(self, plan: StepPlan) -> None:
        for new in plan.new_rows:
            num_shared = new.num_cached_tokens // self._block_size
            block_ids = new.block_ids[:: self._num_groups]
            self._num_written[block_ids[num_shared:]] = 0
            self._blocks[new.row] = block_ids
            written = self._num_written[block_ids[:num_shared]]
            is_full = written == self._block_size
            num_full = num_shared if is_full.all() else int(is_full.argmin())
            partial = int(written[num_full]) if num_full < num_shared else 0
            self.num_computed[new.row] = num_full * self._block_size + partial
            self.num_slots[new.row] = len(block_ids) * self._block_size
        for row, new_ids in plan.new_blocks:
            block_ids = new_ids[:: self._num_groups]
            self._num_written[block_ids] = 0
            self._blocks[row] += block_ids
            self.num_slots[row] += len(block_ids) * self._block_size

    def plan(
        self, rows: np.ndarray, lengths: np.ndarray, wanted: np.ndarray, is_ready: np.ndarray | bool = True
    ) -> DraftRuns:
        """Return the runs that bring the rows to their last known tokens, in row order as far as MAX_CATCH_UP allows.

        Args:
            lengths: known tokens.
            wanted: most drafts. The last draft needs no slot, because nothing is computed after it.
            is_ready: [P] bool, rows whose inputs are known.
        """
        wanted = np.minimum(wanted, self.num_slots[rows] - lengths + 1)
        starts = np.minimum(self.num_computed[rows], lengths - 1)
        # A row without a block for its last token waits for the step that allocates it.
        missing = np.where(is_ready & (lengths <= self.num_slots[rows]), lengths - starts, 0)
        counts = np.clip(np.minimum(missing, MAX_CATCH_UP - np.cumsum(missing) + missing), 0, None)
        is_run = counts > 0
        is_complete = is_run & (counts == lengths - starts) & (wanted > 0)
        return DraftRuns(
            rows[is_run], starts[is_run], counts[is_run], is_complete[is_run], np.flatnonzero(is_complete),
            wanted,
        )

    def finish(self, runs: DraftRuns) -> None:
        """Note that the runs are computed."""
        for row, end in zip(runs.rows.tolist(), (runs.starts + runs.counts).tolist(), strict=True):
            self.advance(row, end)

    def advance(self, row: int, end: int) -> None:
        """Note that the keys and values of all tokens before `end` are written."""
        blocks, size = self._blocks[row], self._block_size
        for index in range(min(int(self.num_computed[row]), end) // size, -(-end // size)):
            self._num_written[blocks[index]] = min(size, end - index * size)
        self.num_computed[row] = end
