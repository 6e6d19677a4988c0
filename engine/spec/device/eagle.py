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
from torch import Tensor, nn

from engine.core.actor_messages import StepPlan
from engine.kv_cache_spec import KVCacheSpec
from engine.model import Model
from engine.model.attn_metadata import AttnMetadata
from engine.model.rope import Rotation
from engine.spec.device.chain import ChainInputs
from engine.spec.device.draft_sampler import DraftSampler
from engine.spec.device.eagle_net import EagleNet
from engine.spec.device.hidden_store import HiddenStore
from engine.spec.device.progress import DraftProgress, DraftRuns
from engine.worker.input_batch import InputBatch
from engine.worker.sampling.sampler import Sampler
from kernels import Ops
from kernels.ops import KVCache

MAX_FIRST = 16  # known pairs of a row that are computed together with its first draft
MAX_BEHIND = 256  # pairs of a row that drafts that are not computed yet; more are computed at once


class Eagle:
    """EAGLE-1 and EAGLE-3, one chain of drafts per row.

    Args:
        target: its output matrix predicts tokens, unless the layer has its own.
        token_map: [draft vocabulary] int64, the token of each output of the layer's own matrix; None: the same ids.
        aux_layers: see Drafter.
    """

    def __init__(
        self, net: EagleNet, target: Model, token_map: Tensor | None, aux_layers: tuple[int, ...],
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

    def modules(self) -> Iterator[nn.Module]:
        return self.net.modules()

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
        self._is_drafting = np.zeros(batch.max_num_seqs, dtype=bool)  # by row, in the last plan

    def take_plan(self, plan: StepPlan) -> None:
        self._progress.apply(plan)
        self._is_drafting[:] = False
        if plan.num_wanted is not None:
            self._is_drafting[plan.rows] = plan.num_wanted > 0
        for new in plan.new_rows:
            self._store.clear(new.row)
            self._sampler.forget(new.row)

    def observe(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, hidden: Tensor) -> None:
        self._store.append(rows, starts, counts, hidden)
        ends = starts + counts
        is_far = self._is_drafting[rows] & (ends - self._progress.num_computed[rows] > MAX_BEHIND)
        if is_far.any():
            # The token after the run is not known yet.
            self._plan_runs(rows[is_far], ends[is_far], np.zeros(int(is_far.sum()), dtype=np.int64))

    def settle(self, row: int, length: int, token_ids: list[int], num_accepted: int) -> None:
        self._sampler.settle(row, length, token_ids, num_accepted)

    @torch.inference_mode()
    def propose(self, rows: np.ndarray, lengths: np.ndarray, wanted: np.ndarray) -> list[list[int]]:
        runs, known = self._plan_runs(rows, lengths, wanted)
        if not len(runs.members):
            return [[] for _ in rows]
        inputs = ChainInputs.make(self._batch, runs, rows, lengths, 1)
        rotation = self._rotate(inputs.positions, inputs.metadata)
        carried = self.net.read_target(known)

        def compute(number: int, drawn: Tensor | None, places: Tensor | None) -> Tensor:
            nonlocal carried
            if places is not None:
                carried = carried.index_select(0, places)
            tokens, metadata = inputs.select(number)
            step = self.net.prepare(rotation.select(tokens), self._kv_cache, metadata)
            token_ids = inputs.token_ids if drawn is None else drawn
            output, carried = self.net(token_ids, carried, self._kv_cache, step)
            if drawn is None:
                output, carried = (each.index_select(0, inputs.last) for each in (output, carried))
            return self._compute_logits(output)

        return self._sampler.draw_chain(rows, lengths, runs.members, runs.wanted, compute)

    def _plan_runs(
        self, rows: np.ndarray, lengths: np.ndarray, wanted: np.ndarray
    ) -> tuple[DraftRuns, Tensor]:
        """Return the pairs of known tokens that the first step of a proposal computes, and their hidden states.

        Stores the keys and values of those that come before, which need no more than that.
        """
        found = [self._read_known(*pair) for pair in zip(rows.tolist(), lengths.tolist(), strict=True)]
        is_known = np.array([each is not None for each in found])
        runs = self._progress.plan(rows, lengths, np.where(is_known, wanted, 0), is_known)
        hidden_of = dict(zip(rows.tolist(), found, strict=True))
        num_stored = np.where(
            runs.is_complete & (runs.counts <= MAX_FIRST), 0, runs.counts - runs.is_complete
        )
        parts: list[Tensor] = []
        stored: list[Tensor] = []
        for row, count, num in zip(
            runs.rows.tolist(), runs.counts.tolist(), num_stored.tolist(), strict=True
        ):
            part = hidden_of[row]
            assert part is not None, "only rows with hidden states have runs"
            stored.append(part[:num])
            parts.append(part[num:count])
        self._progress.finish(runs)
        if num_stored.any():
            is_stored = num_stored > 0
            step = self._batch.make_input(runs.rows[is_stored], runs.starts[is_stored], num_stored[is_stored])
            metadata = step.attn_metadata.use_first_group(1)
            rotation = self._rotate(step.positions, metadata)
            hidden = self.net.read_target(torch.cat(stored))
            inputs = self.net.prepare(rotation, self._kv_cache, metadata)
            self.net.store_keys(step.input_ids, hidden, self._kv_cache, inputs)
            runs = runs.skip(num_stored)
        return runs, torch.cat(parts) if len(parts) > 1 else (parts or [torch.empty(0)])[0]

    def _rotate(self, positions: Tensor, metadata: AttnMetadata) -> Rotation:
        return self.net.rotate((positions - 1).clamp_(min=0), metadata)

    def _read_known(self, row: int, length: int) -> Tensor | None:
        """Return the hidden states before the tokens that are not computed; None if those before `length` are missing.

        Writes zeros for the pairs whose hidden state is missing.
        """
        start = min(int(self._progress.num_computed[row]), length - 1)
        first, parts = self._store.read(row, max(0, start - 1), length - 1)
        if not parts:
            return None
        if first + 1 > start:
            slots = torch.from_numpy(self._batch.list_slots(row, start, first + 1))
            spec = self.net.shape.layer.kv_spec
            zeros = torch.zeros(len(slots), spec.num_kv_heads, spec.head_size, dtype=parts[0].dtype)
            zeros = zeros.to(self._kv_cache[0].device)
            self.ops.store_kv(zeros, zeros, *self._kv_cache, slots.to(zeros.device))
            self._progress.advance(row, first + 1)
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _compute_logits(self, hidden: Tensor) -> Tensor:
        if self.net.lm_head is None:
            return self._target.compute_logits(hidden)
        return spread_logits(self.net.lm_head(hidden, torch.float32), self._token_map, self._vocab_size)


def spread_logits(logits: Tensor, token_map: Tensor | None, vocab_size: int) -> Tensor:
    """Return logits over the target's vocabulary; tokens that the drafter does not know get -inf.

    Args:
        token_map: [outputs] int64, the token of each output; None: output i is token i.
    """
    if token_map is None and logits.shape[1] == vocab_size:
        return logits
    spread = logits.new_full((logits.shape[0], vocab_size), -torch.inf)
    if token_map is None:
        spread[:, : logits.shape[1]] = logits[:, :vocab_size]
    else:
        spread[:, token_map] = logits
    return spread
