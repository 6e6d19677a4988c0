"""AdapterRows: which adapter each row of the batch uses; sorts the rows of a step by adapter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from engine.core.actor_messages import NewRow
from engine.lora.loader import Adapter
from engine.model.adapters import AdapterTables, StepAdapters, join_segments
from engine.model.protocol import Model
from engine.worker.adapter_store import AdapterStore
from engine.worker.launched_step import StartedStep


class AdapterRows:
    """The worker's adapters by row. A row keeps its adapter alive, whatever the store evicts."""

    def __init__(
        self, store: AdapterStore, model: Model, device: torch.device, tables: AdapterTables | None = None
    ) -> None:
        self._store = store
        self._tables = tables
        self._model = model
        self._device = device
        self._by_row: dict[int, Adapter] = {}
        # Rows and counts of the last step with adapters, and its result: decodes often repeat them.
        self._last: tuple[np.ndarray, np.ndarray, StepAdapters | None] | None = None

    def add(self, new_row: NewRow) -> None:
        self.remove(new_row.row)
        if new_row.adapter:
            self._by_row[new_row.row] = self._store.find(new_row.adapter)
            self._last = None

    def remove(self, row: int) -> None:
        if self._by_row.pop(row, None) is not None:
            self._last = None

    def mark(self, step: StartedStep) -> None:
        if not self._by_row:
            return
        last, rows, counts = self._last, step.rows, step.counts
        is_same = last is not None and np.array_equal(last[0], rows) and np.array_equal(last[1], counts)
        if last is None or not is_same or (last[2] is not None and last[2].ops is not self._model.ops):
            last = self._last = (rows, counts, self._sort(rows, counts))
        if last[2] is not None:
            step.model_input = replace(step.model_input, adapters=last[2])

    def _sort(self, rows: np.ndarray, counts: np.ndarray) -> StepAdapters | None:
        ends = np.cumsum(counts)
        places: dict[Adapter, list[np.ndarray]] = {}
        for row, count, end in zip(rows.tolist(), counts.tolist(), ends.tolist(), strict=True):
            if (adapter := self._by_row.get(row)) is not None:
                places.setdefault(adapter, []).append(np.arange(end - count, end))
        bound = [adapter.bind(self._model) for adapter in places]
        tokens = [np.concatenate(each) for each in places.values()]
        return join_segments(self._model.ops, bound, tokens, self._device, self._tables)
