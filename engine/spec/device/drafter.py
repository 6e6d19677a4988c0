"""Drafter: the interface of what proposes drafts on the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
from torch import Tensor, nn

from engine.core.actor_messages import StepPlan
from engine.kv_cache_spec import KVCacheSpec
from engine.worker.input_batch import InputBatch
from engine.worker.sampling.sampler import Sampler
from kernels import Ops
from kernels.ops import KVCache

# Tokens that a drafter computes at once to reach the request's last token; the rest follows in later calls.
MAX_CATCH_UP = 1024


class Drafter(Protocol):
    """Proposes drafts for rows of the batch. One thread owns it.

    `load` is done once; `start` follows whenever the caches and the batch are new.
    """

    @property
    def ops(self) -> Ops:
        """The kernels that it calls."""

    def repack(self, ops: Ops) -> Iterator[None]:
        """Move to other ops, one matrix per iteration."""

    def modules(self) -> Iterator[nn.Module]:
        """Return the modules that hold its weights."""

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Layers of the target whose inputs follow the final hidden state in `observe`."""

    def kv_specs(self) -> tuple[KVCacheSpec, ...]:
        """Return the KV cache content of the drafter's own layers; they share the target's block tables."""

    def start(self, batch: InputBatch, sampler: Sampler, kv_caches: list[KVCache]) -> None:
        """Forget all rows."""

    def take_plan(self, plan: StepPlan) -> None:
        """Take the new rows and blocks of a plan, and which rows draft."""

    def observe(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, hidden: Tensor) -> None:
        """Take the target's hidden states of the runs of the last plan, [T, D or more]."""

    def propose(self, rows: np.ndarray, lengths: np.ndarray, wanted: np.ndarray) -> list[list[int]]:
        """Propose up to `wanted` tokens for each row, whose first `lengths` tokens are in the batch's token pool."""

    def settle(self, row: int, length: int, token_ids: list[int], num_accepted: int) -> None:
        """Take the result of verifying drafts after `length` known tokens; they may be those of another source."""
