"""StepAdapters: the rows of a step that use adapters, and what each adapter changes in the model.

Rows are sorted by adapter once per step. A layer adds the products of the adapters that change it to its own result, so
rows of the base model cost nothing, and a row's result does not depend on the others.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.model.shard import Shard
from kernels import Ops
from kernels.lora import LoraLimits, LoraSegment, LoraTables, PackedLora
from kernels.ops import PackedWeight
from kernels.upload import upload


@dataclass(frozen=True, slots=True)
class MatrixPart:
    """A matrix of the checkpoint, as rows [start, start + num_rows) of a `Linear`."""

    linear: nn.Module
    start: int
    num_rows: int
    order: Tensor | None  # the checkpoint's row of each stored row; None: as it is
    shard: Shard | None = None  # the rank's part of the checkpoint's matrix, before the order


@dataclass(frozen=True, slots=True)
class EmbeddingChange:
    """Changes of an adapter to the input embedding."""

    table: Tensor | None = None  # [V, D], in place of the model's
    a: Tensor | None = None  # [V, rank]
    b: Tensor | None = None  # [D, rank], with the scale
    factor: Tensor | None = None  # [D], of the sum (DoRA)

    def apply(self, token_ids: Tensor, embedded: Tensor) -> Tensor:
        """Return the embeddings of tokens, given the model's, [N, D]."""
        if self.table is not None:
            embedded = F.embedding(token_ids, self.table)
        if self.a is None or self.b is None:
            return embedded
        changed = embedded.float() + F.embedding(token_ids, self.a).float() @ self.b.float().t()
        if self.factor is not None:
            changed *= self.factor
        return changed.to(embedded.dtype)


@dataclass(eq=False, slots=True)
class AdapterHandle:
    """The number by which other ranks know an adapter. They free it when nothing on rank 0 refers to it any more."""

    number: int
    freed: deque[int]  # receives the number

    def __del__(self) -> None:
        self.freed.append(self.number)


@dataclass(eq=False, slots=True, weakref_slot=True)
class BoundAdapter:
    """An adapter in the layout of the ops that the model uses."""

    ops: Ops
    matrices: dict[nn.Module, PackedLora]
    saved: dict[nn.Module, PackedWeight]  # whole matrices in place of the model's
    embedding: EmbeddingChange | None
    head: nn.Module
    handle: AdapterHandle | None  # None: there is one rank

    @property
    def changes_head(self) -> bool:
        return self.head in self.matrices or self.head in self.saved


class AdapterSegment(NamedTuple):
    """The places [start, end) of the list of rows that one adapter has."""

    adapter: BoundAdapter
    start: int
    end: int


class AdapterTables:
    """Lists on the device which matrices the adapters of a step change.

    An adapter gets a number when a step first uses it, and one upload writes its entries of all layers. Later steps
    upload the numbers of their rows alone, and a recorded step reads the same memory for any adapters.

    Args:
        parts: of the model.
        max_loras: adapters of a step at most; their number stands for none.
        max_rank: of an adapter.
    """

    def __init__(
        self, ops: Ops, parts: Iterable[MatrixPart], max_loras: int, max_rank: int, device: torch.device
    ) -> None:
        assert ops.lora_tables is not None, "these ops have tables"
        self.ops = ops
        self._tables: LoraTables = ops.lora_tables
        self.max_loras = max_loras
        widths: dict[nn.Module, list[int]] = {}
        for part in parts:
            widths.setdefault(part.linear, []).append(part.num_rows)
        self._limits = {linear: LoraLimits(len(each), max_rank, max(each)) for linear, each in widths.items()}
        sizes = [limits.num_words for limits in self._limits.values()]
        self._entries = torch.zeros(max_loras + 1, sum(sizes), dtype=torch.int64, device=device)
        starts = np.cumsum([0, *sizes]).tolist()
        self._starts = dict(zip(self._limits, starts, strict=False))
        # By number; the adapters belong to the rows that use them.
        self._adapters: list[weakref.ref[BoundAdapter] | None] = [None] * max_loras
        self._order = list(range(max_loras))  # numbers, the least recently used first

    def number(self, adapters: Sequence[BoundAdapter]) -> list[int]:
        """Return the numbers of a step's adapters."""
        known = {id(held): at for at, ref in enumerate(self._adapters) if ref is not None and (held := ref())}
        found = {id(each): known[id(each)] for each in adapters if id(each) in known}
        free = [number for number in self._order if number not in found.values()]
        for adapter in adapters:
            if id(adapter) not in found:
                number = found[id(adapter)] = free.pop(0)
                self._adapters[number] = weakref.ref(adapter)
                self._entries[number].copy_(upload(self._encode(adapter), self._entries.device))
        used = [found[id(each)] for each in adapters]
        self._order = [number for number in self._order if number not in used] + used
        return used

    def add(self, linear: nn.Module, x: Tensor, y: Tensor, rows: Tensor, numbers: Tensor) -> None:
        """Add what the adapters change in the result y of a layer on x, in place."""
        limits, start = self._limits[linear], self._starts[linear]
        entries = self._entries[:, start : start + limits.num_words]
        self._tables.add_listed(y, x, rows, numbers, entries, limits)

    def _encode(self, adapter: BoundAdapter) -> np.ndarray:
        words = np.zeros(self._entries.shape[1], dtype=np.int64)
        for linear, packed in adapter.matrices.items():
            entry, start = self._tables.encode(packed), self._starts[linear]
            words[start : start + len(entry)] = entry
        return words


@dataclass(frozen=True, slots=True)
class StepAdapters:
    """The rows of hidden states that use adapters, sorted by adapter."""

    ops: Ops
    rows: Tensor  # [N] int64
    segments: list[AdapterSegment]
    host_rows: np.ndarray | None = None  # the same rows, on rank 0
    tables: AdapterTables | None = None
    numbers: Tensor | None = None  # [N] int64, in the tables

    def change(self, linear: nn.Module, x: Tensor, y: Tensor) -> None:
        """Change the result y of a layer on x, in place, in the rows whose adapter changes this layer."""
        for adapter, start, end in self.segments:
            if (weight := adapter.saved.get(linear)) is not None:
                rows = self.rows[start:end]
                y.index_copy_(0, rows, self.ops.linear(x.index_select(0, rows), weight, None, y.dtype))
        if self.tables is not None and self.numbers is not None:
            self.tables.add(linear, x, y, self.rows, self.numbers)
        elif found := self.find(linear):
            self.ops.add_lora(y, x, self.rows, found)

    def find(self, linear: nn.Module) -> list[LoraSegment]:
        """Return the changes of a layer, each with its rows."""
        return [
            LoraSegment(matrix, start, end)
            for adapter, start, end in self.segments
            if (matrix := adapter.matrices.get(linear)) is not None
        ]

    def embed(self, token_ids: Tensor, embedded: Tensor) -> None:
        """Change the embeddings of the step's tokens in place."""
        for adapter, start, end in self.segments:
            if adapter.embedding is not None:
                rows = self.rows[start:end]
                changed = adapter.embedding.apply(token_ids[rows], embedded.index_select(0, rows))
                embedded.index_copy_(0, rows, changed)

    def select_head(self, index: np.ndarray) -> StepAdapters | None:
        """Return the adapters of some rows, renumbered, that change the output head; None if there are none.

        Args:
            index: [R] rows of the step; a row may appear several times.
        """
        chosen = [segment for segment in self.segments if segment.adapter.changes_head]
        if not chosen:
            return None
        assert self.host_rows is not None, "rank 0 selects the rows"
        places = [np.flatnonzero(np.isin(index, self.host_rows[start:end])) for _, start, end in chosen]
        adapters = [each.adapter for each in chosen]
        return join_segments(self.ops, adapters, places, self.rows.device, self.tables)

    @property
    def is_recordable(self) -> bool:
        """Whether the tables say all that the adapters change before the output head."""
        adapters = [each.adapter for each in self.segments]
        has_others = any(each.embedding is not None or each.saved.keys() - {each.head} for each in adapters)
        return self.tables is not None and not has_others


def join_segments(
    ops: Ops, adapters: list[BoundAdapter], places: list[np.ndarray], device: torch.device,
    tables: AdapterTables | None = None,
) -> StepAdapters | None:
    """Return the adapters with the rows of each; None if there are no rows."""
    segments, end = [], 0
    for adapter, rows in zip(adapters, places, strict=True):
        start, end = end, end + len(rows)
        if end > start:
            segments.append(AdapterSegment(adapter, start, end))
    if not segments:
        return None
    rows = np.concatenate(places)
    if tables is None:
        return StepAdapters(ops, upload(rows, device), segments, rows)
    numbers = np.repeat(tables.number([each.adapter for each in segments]), [end - start for _, start, end in segments])
    sent = upload(np.stack((rows, numbers)), device)
    return StepAdapters(ops, sent[0], segments, rows, tables, sent[1])
