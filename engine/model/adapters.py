"""StepAdapters: the rows of a step that use adapters, and what each adapter changes in the model.

Rows are sorted by adapter once per step. A layer adds the products of the adapters that change it to its own result, so
rows of the base model cost nothing, and a row's result does not depend on the others.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.model.shard import Shard
from kernels import Ops
from kernels.lora import LoraSegment, PackedLora
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


@dataclass(frozen=True, slots=True)
class StepAdapters:
    """The rows of hidden states that use adapters, sorted by adapter."""

    ops: Ops
    rows: Tensor  # [N] int64
    segments: list[AdapterSegment]
    host_rows: np.ndarray | None = None  # the same rows, on rank 0

    def change(self, linear: nn.Module, x: Tensor, y: Tensor) -> None:
        """Change the result y of a layer on x, in place, in the rows whose adapter changes this layer."""
        for adapter, start, end in self.segments:
            if (weight := adapter.saved.get(linear)) is not None:
                rows = self.rows[start:end]
                y.index_copy_(0, rows, self.ops.linear(x.index_select(0, rows), weight, None, y.dtype))
        if found := self.find(linear):
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
        return join_segments(self.ops, [each.adapter for each in chosen], places, self.rows.device)


def join_segments(
    ops: Ops, adapters: list[BoundAdapter], places: list[np.ndarray], device: torch.device
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
    return StepAdapters(ops, upload(rows, device), segments, rows)
