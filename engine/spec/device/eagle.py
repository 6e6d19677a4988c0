"""Eagle: drafts with an EAGLE layer over the target's hidden states.

Slot i of its KV cache belongs to the pair (hidden state of token i - 1, token i) at RoPE position i - 1. A block thus
depends on its own tokens only, so a hit in the prefix cache also finds the drafter's keys and values. The first pair
after a hit, and slot 0, lack the hidden state; their keys and values are zero.

A row that drafts computes pairs together, as a prompt is computed. While a row does not draft nothing is computed; when
it drafts again, pairs whose hidden state is no longer stored get zeros, too.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from engine.kv_cache_spec import KVCacheSpec
from engine.messages import StepPlan
from engine.model import Model
from engine.spec.device.draft_sampler import DraftSampler, to_lists
from engine.spec.device.eagle_net import EagleNet
from engine.spec.device.hidden_store import HiddenStore
from engine.spec.device.medusa import spread_logits
from engine.spec.device.progress import DraftProgress, DraftRuns
from engine.worker.input_batch import InputBatch, ModelInput
from engine.worker.sampling.sampler import Sampler
from engine.worker.sampling.transfer import upload
from kernels import Ops
from kernels.ops import KVCache

MAX_BEHIND = 256  # pairs of a row that drafts that are not computed yet; more are computed at once


class Eagle:
    """EAGLE-1 and EAGLE-3, one chain of drafts per row.

    Args:
        target: its output matrix predicts tokens, unless the layer has its own.
        token_map: [draft vocabulary] int64, the token of each output of the layer's own matrix; None: the same ids.
        aux_layers: see Drafter.
    """

    def __init__(
        self,
        net: EagleNet,
        target: Model,
        token_map: Tensor | None,
        aux_layers: tuple[int, ...],
        is_greedy: bool,
    ) -> None:
        self.net = net
        self.aux_layers = aux_layers
        self._target = target
        self._token_map = token_map
        self._is_greedy = is_greedy

    @property
    def ops(self) -> Ops:
        return self.net.ops

    def repack(self, ops: Ops) -> Iterator[None]:
        return self.net.repack(ops)

    def kv_specs(self) -> tuple[KVCacheSpec, ...]:
        return (self.net.shape.layer.kv_spec,)

    def start(self, batch: InputBatch, sampler: Sampler, kv_caches: list[KVCache]) -> None:
        self._batch = batch
        (self._kv_cache,) = kv_caches
        self._vocab_size = sampler.state.vocab_size
        self._sampler = DraftSampler(sampler, self._is_greedy)
        self._store = HiddenStore()
        self._progress = DraftProgress(batch, self._kv_cache[0].shape[0])

    def take_plan(self, plan: StepPlan) -> None:
        self._progress.apply(plan)
        self._drafting = plan.rows[:0] if plan.num_wanted is None else plan.rows[plan.num_wanted > 0]
        for new in plan.new_rows:
            self._store.clear(new.row)
            self._sampler.forget(new.row)

    def observe(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, hidden: Tensor) -> None:
        self._store.append(rows, starts, counts, hidden)
        if not len(self._drafting):
            return
        ends = starts + counts
        is_far = np.isin(rows, self._drafting) & (ends - self._progress.num_computed[rows] > MAX_BEHIND)
        if is_far.any():
            # The token after the run is not known yet.
            self._run_known(rows[is_far], ends[is_far], np.zeros(int(is_far.sum()), dtype=np.int64))

    def settle(self, row: int, length: int, token_ids: list[int], num_accepted: int) -> None:
        self._sampler.settle(row, length, token_ids, num_accepted)

    @torch.inference_mode()
    def propose(self, rows: np.ndarray, lengths: np.ndarray, wanted: np.ndarray) -> list[list[int]]:
        runs, last, carried = self._run_known(rows, lengths, wanted)
        self._sampler.begin()
        columns: list[Tensor] = []
        groups: list[np.ndarray] = []
        members = runs.members
        while len(members):
            number = len(columns)
            drawn = self._sampler.draw(self._compute_logits(last), rows[members], lengths[members] + number)
            columns.append(drawn)
            groups.append(members)
            is_left = runs.wanted[members] > number + 1
            members = members[is_left]
            if len(members):
                positions = lengths[members] + number
                places = upload(np.flatnonzero(is_left), drawn.device)
                self._batch.append(rows[members], positions, drawn.index_select(0, places))
                step = self._batch.make_input(rows[members], positions, np.ones_like(positions))
                last, carried = self._run(step, carried.index_select(0, places))
        drafts = to_lists(columns, groups, len(rows))
        self._sampler.keep(rows, lengths, drafts)
        return drafts

    def _run_known(
        self, rows: np.ndarray, lengths: np.ndarray, wanted: np.ndarray
    ) -> tuple[DraftRuns, Tensor, Tensor]:
        """Compute the pairs of known tokens.

        Returns the runs, and for each complete row the input of the output matrix and the predicted hidden state.
        """
        nothing = torch.empty(0)
        is_known = np.array(
            [self._skip_unknown(*pair) for pair in zip(rows.tolist(), lengths.tolist(), strict=True)]
        )
        runs = self._progress.plan(rows, lengths, np.where(is_known, wanted, 0), is_known)
        if not len(runs.rows):
            return runs, nothing, nothing
        parts = []
        for row, start, count in zip(
            runs.rows.tolist(), runs.starts.tolist(), runs.counts.tolist(), strict=True
        ):
            first, found = self._store.read(row, start - 1, start - 1 + count)
            assert first == start - 1, "unknown hidden states were skipped"
            parts += found
        step = self._batch.make_input(runs.rows, runs.starts, runs.counts)
        output, predicted = self._run(step, self.net.read_target(torch.cat(parts)))
        self._progress.finish(runs)
        places = upload(step.last_token_index[runs.is_complete], output.device)
        return runs, output.index_select(0, places), predicted.index_select(0, places)

    def _run(self, step: ModelInput, hidden: Tensor) -> tuple[Tensor, Tensor]:
        positions = (step.positions - 1).clamp(min=0)
        output, predicted = self.net(step.input_ids, hidden, positions, self._kv_cache, step.attn_metadata)
        return output, predicted

    def _skip_unknown(self, row: int, length: int) -> bool:
        """Write zeros for the pairs whose hidden state is missing. Returns whether the others reach `length`."""
        start = min(int(self._progress.num_computed[row]), length - 1)
        first, parts = self._store.read(row, max(0, start - 1), length - 1)
        if not parts:
            return False
        if first + 1 > start:
            slots = torch.from_numpy(self._batch.list_slots(row, start, first + 1))
            for cache in self._kv_cache:
                cache.view(-1, *cache.shape[2:])[slots.to(cache.device)] = 0
            self._progress.advance(row, first + 1)
        return True

    def _compute_logits(self, hidden: Tensor) -> Tensor:
        if self.net.lm_head is None:
            return self._target.compute_logits(hidden)
        return spread_logits(self.net.lm_head(hidden, torch.float32), self._token_map, self._vocab_size)
