"""LoRA: adds the low-rank product of an adapter to the rows of a step that use it.

    y[rows] = (y[rows] + (x[rows] A^T) B^T) * factor + offset          for each segment of rows

Rows outside the segments are neither read nor written. Source: Hu et al., 2021 (LoRA); Liu et al., 2024 (DoRA).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

# Result of `pack_lora`; its type depends on the implementation.
PackedLora = Any


@dataclass(frozen=True, slots=True)
class LoraPart:
    """The change of some consecutive outputs of a matrix."""

    start: int  # first output
    first_rank: int  # its rows of A
    b: Tensor  # [width, rank]
    scale: float  # of the product
    factor: Tensor | None = None  # [width] float32, of the sum (DoRA)
    offset: Tensor | None = None  # [width] float32, added last

    @property
    def width(self) -> int:
        return self.b.shape[0]

    @property
    def rank(self) -> int:
        return self.b.shape[1]


@dataclass(frozen=True, slots=True)
class LoraMatrix:
    """The change of one matrix [out, in], in which several matrices of a checkpoint may be stacked."""

    a: Tensor  # [ranks of all parts, in]
    parts: tuple[LoraPart, ...]
    out_features: int


class LoraSegment(NamedTuple):
    """The places [start, end) of the step's list of rows, all of one adapter."""

    matrix: PackedLora
    start: int
    end: int


class LoraLimits(NamedTuple):
    """Upper bounds of the changes of one matrix by any adapter."""

    num_parts: int
    rank: int  # of a part
    width: int  # of a part

    @property
    def num_words(self) -> int:
        """The size of a `LoraTables` entry; even, for the alignment of the next one."""
        size = 4 + 7 * self.num_parts
        return size + size % 2


class LoraTables(Protocol):
    """Adds the changes that a table on the device lists, so that one launch serves any adapters."""

    def encode(self, matrix: PackedLora) -> list[int]:
        """Return the entry of one adapter's change of a matrix; it holds addresses, and keeps no memory alive."""

    def add_listed(
        self, y: Tensor, x: Tensor, rows: Tensor, numbers: Tensor, table: Tensor, limits: LoraLimits
    ) -> None:
        """Add the products to y, in place.

        Args:
            y, x, rows: see `add_lora`.
            numbers: [N] int64, the entry of each row's adapter.
            table: [entries, words] int64; an entry of zeros changes nothing.
        """


def add_lora(y: Tensor, x: Tensor, rows: Tensor, segments: Sequence[LoraSegment]) -> None:
    """Add the products of adapters to y, in place.

    Args:
        y: [T, out], the base model's product; float32 or the dtype of x.
        x: [T, in].
        rows: [N] int64, rows of x, sorted by adapter; no row appears twice.
        segments: disjoint ranges of `rows`; matrices are `LoraMatrix`.
    """
    for matrix, start, end in segments:
        index = rows[start:end]
        low = x.index_select(0, index).float() @ matrix.a.float().t()
        out = y.index_select(0, index).float()
        for part in matrix.parts:
            columns = out[:, part.start : part.start + part.width]
            ranks = low[:, part.first_rank : part.first_rank + part.rank] * part.scale
            columns += ranks @ part.b.float().t()
            if part.factor is not None:
                columns *= part.factor
            if part.offset is not None:
                columns += part.offset
        y.index_copy_(0, index, out.to(y.dtype))


def pack_lora(matrix: LoraMatrix) -> LoraMatrix:
    """Return the matrix as `add_lora` takes it."""
    return matrix
