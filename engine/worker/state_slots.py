"""StateSlots: the states of rows and the snapshots of the prefix cache, for models with state layers.

    slots    [0, max_num_seqs)    [max_num_seqs, ...)
             one of each row      snapshots, and states of drafts

A run that passes a position where a snapshot is kept is cut there into segments: the first writes its state to the
snapshot, the next one continues from it. A run with drafts keeps the state before each draft in the same way; when the
drafts are verified, the state after the last accepted one is copied to the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from engine.config import EngineConfig
from engine.core.actor_messages import NewRow, StateSave
from engine.errors import ConfigError
from engine.kv_cache_spec import StateCacheSpec
from engine.model import ModelConfig
from engine.worker.launched_step import StartedStep
from kernels.ops import StateCache
from kernels.states import StateSegments


def check_states(config: EngineConfig, model_config: ModelConfig) -> None:
    """Refuse settings that do not support state layers."""
    if not any(model_config.layer_states):
        return
    why = f"{model_config.architecture} has layers with a state per request, which this setting does not support"
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if (size := getattr(config, name)) > 1:
            raise ConfigError(f"{name}={size}: {why}; use 1")


def allocate_states(
    specs: Sequence[StateCacheSpec], num_slots: int, device: torch.device
) -> list[StateCache]:
    return [
        (
            torch.zeros(num_slots, *spec.conv, device=device),
            torch.zeros(num_slots, *spec.recurrent, device=device),
        )
        for spec in specs
    ]


class StateSlots:
    """Marks which states a step reads and writes.

    Args:
        caches: of each state layer; slots of `num_rows` rows, then snapshots.
    """

    def __init__(self, caches: Sequence[StateCache], num_rows: int) -> None:
        self._tensors = [tensor for cache in caches for tensor in cache]
        self._num_rows = num_rows
        self._drafted: dict[int, dict[int, int]] = {}  # row with drafts in flight -> position -> slot

    def add(self, new_row: NewRow) -> None:
        """Copy the snapshot that a new row starts from."""
        if new_row.snapshot >= 0:
            self._copy([(self._num_rows + new_row.snapshot, new_row.row)])

    def save_skipped(self, saves: Sequence[StateSave], rows: set[int]) -> None:
        """Keep the states of rows that do not run in this step; they are at the start of their runs."""
        self._copy([(save.row, self._num_rows + save.slot) for save in saves if save.row in rows])

    def mark(self, step: StartedStep) -> None:
        """Cut the step's runs into segments; `saves` of rows that do not run are ignored."""
        kept = [(save.row, save.position, self._num_rows + save.slot) for save in step.plan.saves]
        self._drafted |= {row: {} for row in step.rows[step.plan.num_samples[step.live] > 1].tolist()}
        for row, position, slot in kept:
            if row in self._drafted:
                self._drafted[row][position] = slot
        metadata = step.model_input.attn_metadata
        metadata = replace(metadata, states=cut_runs(step.rows, step.starts, step.counts, kept))
        step.model_input = replace(step.model_input, attn_metadata=metadata)

    def settle(self, rows: np.ndarray, positions: np.ndarray) -> None:
        """Give rows whose drafts are verified the state before the token at `positions`, the next to compute."""
        pairs = []
        for row, position in zip(rows.tolist(), positions.tolist(), strict=True):
            slot = self._drafted.pop(row, {}).get(position)  # None: all were right, so the row has it
            if slot is not None:
                pairs.append((slot, row))
        self._copy(pairs)

    def remove(self, row: int) -> None:
        self._drafted.pop(row, None)

    def _copy(self, pairs: list[tuple[int, int]]) -> None:
        for source, target in pairs:
            for tensor in self._tensors:
                tensor[target] = tensor[source]


def cut_runs(
    slots: np.ndarray, starts: np.ndarray, counts: np.ndarray, saves: Sequence[tuple[int, int, int]]
) -> StateSegments:
    """Return the segments of a step's runs [start, start + count).

    Args:
        slots: of the runs' states.
        saves: (slot of the run, position, slot of the snapshot), by position within each run; the position lies in
            the run, and the snapshot has the state before its token.
    """
    firsts = np.cumsum(counts) - counts
    sources = np.where(starts > 0, slots, -1)
    if not saves:
        return StateSegments(sources, slots.astype(np.int64), firsts, counts, np.arange(1, len(slots) + 1))
    by_slot: dict[int, list[tuple[int, int]]] = {}
    for slot, position, snapshot in saves:
        by_slot.setdefault(slot, []).append((position, snapshot))
    parts: list[tuple[int, int, int, int]] = []
    run_ends = []
    runs = zip(
        slots.tolist(), sources.tolist(), firsts.tolist(), starts.tolist(), counts.tolist(), strict=True
    )
    for slot, source, first, start, count in runs:
        done = 0
        for position, snapshot in by_slot.get(slot, ()):
            parts.append((source, snapshot, first + done, position - start - done))
            source, done = snapshot, position - start
        parts.append((source, slot, first + done, count - done))
        run_ends.append(len(parts))
    source_, target, first_, count_ = np.array(parts, dtype=np.int64).T.copy()
    return StateSegments(source_, target, first_, count_, np.array(run_ends))
