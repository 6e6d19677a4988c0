"""DraftModel: a smaller model with the same tokenizer drafts token by token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from engine.core.actor_messages import StepPlan
from engine.kv_cache_spec import KVCacheSpec, group_layers
from engine.model import Model
from engine.spec.device.chain import ChainInputs
from engine.spec.device.draft_sampler import DraftSampler
from engine.spec.device.progress import DraftProgress
from engine.worker.input_batch import InputBatch
from engine.worker.sampling.sampler import Sampler
from kernels import Ops
from kernels.ops import KVCache


class DraftModel:
    """Keeps a KV cache of its own in the target's blocks.

    It computes nothing while it proposes nothing; the next proposal first catches up with the request's tokens.
    """

    aux_layers: tuple[int, ...] = ()

    def __init__(self, model: Model, is_greedy: bool) -> None:
        self.model = model
        self._num_groups = len(group_layers(model.kv_specs()))
        self._is_greedy = is_greedy

    @property
    def ops(self) -> Ops:
        return self.model.ops

    def modules(self) -> Iterator[nn.Module]:
        return self.model.modules()

    def repack(self, ops: Ops) -> Iterator[None]:
        return self.model.repack(ops)

    def kv_specs(self) -> tuple[KVCacheSpec, ...]:
        # All layers use blocks of the target's first group, which are never freed early.
        return tuple(replace(spec, window=None) for spec in self.model.kv_specs())

    def start(self, batch: InputBatch, sampler: Sampler, kv_caches: list[KVCache]) -> None:
        self._batch = batch
        self._kv_caches = kv_caches
        self._sampler = DraftSampler(sampler, self._is_greedy)
        self._progress = DraftProgress(batch, kv_caches[0][0].shape[0])

    def take_plan(self, plan: StepPlan) -> None:
        self._progress.apply(plan)
        for new in plan.new_rows:
            self._sampler.forget(new.row)

    def observe(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, hidden: Tensor) -> None:
        """Do nothing: a draft model reads tokens only."""

    def settle(self, row: int, length: int, token_ids: list[int], num_accepted: int) -> None:
        """Keep the keys and values of accepted drafts, which were computed while drafting."""
        if num_drawn := self._sampler.settle(row, length, token_ids, num_accepted):
            self._progress.advance(row, length + min(num_accepted, num_drawn - 1))

    @torch.inference_mode()
    def propose(self, rows: np.ndarray, lengths: np.ndarray, wanted: np.ndarray) -> list[list[int]]:
        runs = self._progress.plan(rows, lengths, wanted)
        if not len(runs.rows):
            return [[] for _ in rows]
        inputs = ChainInputs.make(self._batch, runs, rows, lengths, self._num_groups)
        hidden = self._run(inputs, 0, inputs.token_ids)
        self._progress.finish(runs)
        last = hidden.index_select(0, inputs.last)

        def compute(number: int, drawn: Tensor | None, places: Tensor | None) -> Tensor:
            return self.model.compute_logits(last if drawn is None else self._run(inputs, number, drawn))

        return self._sampler.draw_chain(rows, lengths, runs.members, runs.wanted, compute)

    def _run(self, inputs: ChainInputs, number: int, token_ids: Tensor) -> Tensor:
        tokens, metadata = inputs.select(number)
        return self.model(token_ids, inputs.positions[tokens], self._kv_caches, metadata)
