"""Drafts: samples several tokens per row in one step, and verifies the drafts.

A row with d drafts has d + 1 positions: its next token, and one after each draft. Each position is sampled as without
drafts, with the row's parameters and the noise of the position. A sampled token is kept if all drafts before it equal
the sampled tokens, so drafts never change a text.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.worker.sampling.sampler import HISTORY_FLAGS, SampledTokens, Sampler
from kernels.upload import upload


@dataclass(frozen=True, slots=True)
class SampleRuns:
    """R sampling rows of a step, with N positions in total, row after row."""

    indices: np.ndarray  # [R] index of the row in the step
    rows: np.ndarray  # [R]
    ends: np.ndarray  # [R] position of the token sampled after the row's last draft
    counts: np.ndarray  # [R] positions of the row, at least 1
    draft_token_ids: np.ndarray  # [N - R] row after row
    wanted: np.ndarray | None = None  # [R] drafts to propose after the row's tokens; None: none

    @property
    def has_drafts(self) -> bool:
        return len(self.draft_token_ids) > 0

    @property
    def flat_rows(self) -> np.ndarray:
        """[N] row of each position."""
        return np.repeat(self.rows, self.counts) if self.has_drafts else self.rows

    @property
    def positions(self) -> np.ndarray:
        """[N] position in the sequence of each sampled token."""
        return self.spread(self.ends)

    @property
    def offsets(self) -> np.ndarray:
        """[R] index of the row's first position among the N."""
        return np.cumsum(self.counts) - self.counts

    def spread(self, last: np.ndarray) -> np.ndarray:
        """Return [N] consecutive numbers per row that end at the row's `last` [R]."""
        if not self.has_drafts:
            return last
        firsts = last - self.counts + 1
        return np.repeat(firsts - self.offsets, self.counts) + np.arange(int(self.counts.sum()))

    def select(self, is_kept: np.ndarray) -> SampleRuns:
        drafts = self.draft_token_ids
        if self.has_drafts:
            drafts = drafts[np.repeat(is_kept, self.counts - 1)]
        wanted = None if self.wanted is None else self.wanted[is_kept]
        return SampleRuns(
            self.indices[is_kept], self.rows[is_kept], self.ends[is_kept], self.counts[is_kept], drafts,
            wanted,
        )

    def index_of(self, place: int) -> int:
        """Return the index in the step of the row of position `place`, in [0, N)."""
        row = np.searchsorted(self.offsets, place, side="right") - 1 if self.has_drafts else place
        return int(self.indices[row])

    def verify(self, token_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Verify the drafts against the sampled tokens [N].

        Returns the number of kept tokens per row, [R], and whether each token is kept, [N] bool.
        """
        if not self.has_drafts:
            return self.counts, np.ones(len(token_ids), dtype=bool)
        is_first = np.zeros(len(token_ids), dtype=bool)
        is_first[self.offsets] = True
        is_wrong = np.zeros(len(token_ids), dtype=np.int64)
        is_wrong[~is_first] = token_ids[np.flatnonzero(~is_first) - 1] != self.draft_token_ids
        num_wrong = np.cumsum(is_wrong)
        is_kept = num_wrong == np.repeat(num_wrong[self.offsets], self.counts)
        return np.add.reduceat(is_kept, self.offsets), is_kept


def sample_runs(
    sampler: Sampler, runs: SampleRuns, logits: Tensor, bitmask: np.ndarray | None = None
) -> SampledTokens:
    """Sample every position. Tokens after a wrong draft are meaningless.

    Args:
        logits: [N, V] float32; overwritten.
        bitmask: [N, ceil(V/32)] int32, or None.
    """
    rows, positions = runs.flat_rows, runs.positions
    if not runs.has_drafts or not (sampler.state.flags[runs.rows] & HISTORY_FLAGS).any():
        return sampler.sample(logits, rows, positions, bitmask)
    # Penalties and bad words depend on earlier tokens, so sample one position of all rows at a time. Tokens after a
    # wrong draft are not added to the row's history.
    device = logits.device
    token_ids = torch.empty(len(rows), dtype=torch.int64, device=device)
    is_right = torch.ones(len(runs.rows), dtype=torch.bool, device=device)
    drafts = np.full(len(rows), -1, dtype=np.int64)
    is_last = np.zeros(len(rows), dtype=bool)
    is_last[runs.offsets + runs.counts - 1] = True
    drafts[~is_last] = runs.draft_token_ids
    logprobs = []
    for number in range(int(runs.counts.max())):
        members = np.flatnonzero(runs.counts > number)
        places = runs.offsets[members] + number
        member_ids, place_ids = upload(members, device), upload(places, device)
        masks = None if bitmask is None else np.ascontiguousarray(bitmask[places])
        part = sampler.sample(
            logits.index_select(0, place_ids), rows[places], positions[places], masks, is_right[member_ids]
        )
        token_ids[place_ids] = part.token_ids
        is_right[member_ids] &= part.token_ids == upload(drafts[places], device)
        logprobs += [found.move(places) for found in part.logprobs]
    return SampledTokens(token_ids, logprobs)
