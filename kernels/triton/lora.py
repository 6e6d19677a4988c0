"""Low-rank products of adapters: two launches per matrix, whatever the number of adapters.

A program computes one row, so its sums have one order in any batch. Tables of addresses tell it where its adapter's
matrices are; they are made once per composition of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import ref

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.lora import LoraMatrix, LoraSegment
from kernels.triton.launch import FUSED, check_contiguous, check_float, next_power_of_2
from kernels.upload import upload

BLOCK_IN, BLOCK_RANK, BLOCK_OUT = 256, 16, 64
MAX_TABLES = 1024
_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit
def lora_low_kernel(
    low_ptr: tl.tensor,
    x_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    row_segments_ptr: tl.tensor,
    segments_ptr: tl.tensor,
    low_stride: int,
    SIZE: tl.constexpr,
    WEIGHT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64)
    record = segments_ptr + tl.load(row_segments_ptr + place) * 5
    a = tl.load(record).to(tl.pointer_type(WEIGHT))
    scales = tl.load(record + 1).to(tl.pointer_type(tl.float32))
    ranks = tl.program_id(1) * BLOCK_RANK + tl.arange(0, BLOCK_RANK).to(tl.int64)
    is_rank = ranks < tl.load(record + 2)
    x_row = x_ptr + tl.load(rows_ptr + place) * SIZE
    sums = tl.zeros([BLOCK_RANK], tl.float32)
    for start in range(0, SIZE, BLOCK_IN):
        columns = start + tl.arange(0, BLOCK_IN)
        x = tl.load(x_row + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
        mask = is_rank[:, None] & (columns < SIZE)[None, :]
        weights = tl.load(a + ranks[:, None] * SIZE + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        sums += tl.sum(weights * x[None, :], axis=1)
    scale = tl.load(scales + ranks, mask=is_rank, other=0.0)
    tl.store(low_ptr + place * low_stride + ranks, sums * scale, mask=is_rank)


@triton.jit
def lora_add_kernel(
    y_ptr: tl.tensor,
    low_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    row_segments_ptr: tl.tensor,
    segments_ptr: tl.tensor,
    parts_ptr: tl.tensor,
    low_stride: int,
    SIZE: tl.constexpr,
    WEIGHT: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64)
    record = segments_ptr + tl.load(row_segments_ptr + place) * 5
    if tl.program_id(1) < tl.load(record + 4):
        part = parts_ptr + (tl.load(record + 3) + tl.program_id(1)) * 7
        b = tl.load(part).to(tl.pointer_type(WEIGHT))
        factor, offset = tl.load(part + 1), tl.load(part + 2)
        width, rank = tl.load(part + 4), tl.load(part + 6)
        outputs = tl.program_id(2) * BLOCK_OUT + tl.arange(0, BLOCK_OUT).to(tl.int64)
        ranks = tl.arange(0, BLOCK_RANK).to(tl.int64)
        is_output, is_rank = outputs < width, ranks < rank
        low = tl.load(low_ptr + place * low_stride + tl.load(part + 5) + ranks, mask=is_rank, other=0.0)
        mask = is_output[:, None] & is_rank[None, :]
        weights = tl.load(b + outputs[:, None] * rank + ranks[None, :], mask=mask, other=0.0).to(tl.float32)
        target = y_ptr + tl.load(rows_ptr + place) * SIZE + tl.load(part + 3) + outputs
        y = tl.load(target, mask=is_output, other=0.0).to(tl.float32) + tl.sum(weights * low[None, :], axis=1)
        if factor != 0:
            y *= tl.load(factor.to(tl.pointer_type(tl.float32)) + outputs, mask=is_output, other=1.0)
        if offset != 0:
            y += tl.load(offset.to(tl.pointer_type(tl.float32)) + outputs, mask=is_output, other=0.0)
        tl.store(target, y.to(y_ptr.dtype.element_ty), mask=is_output)


@dataclass(eq=False, frozen=True, slots=True, weakref_slot=True)
class TritonLora:
    """An adapter's change of a matrix with all numbers in one dtype."""

    matrix: LoraMatrix
    scales: Tensor  # [ranks] float32
    b: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class _Table:
    """The addresses and sizes of the matrices of some segments."""

    matrices: tuple[ref[TritonLora], ...]  # weak, so that a dropped adapter leaves the device
    row_segments: Tensor  # [N] int64
    segments: Tensor  # [S, 5] int64: A, scales, ranks, first part, number of parts
    parts: Tensor  # [P, 7] int64: B, factor, offset, start, width, first rank, rank


class LoraOp:
    """The op of one engine; it keeps the tables of the last steps."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._tables: dict[tuple[tuple[int, int, int], ...], _Table] = {}

    def pack(self, matrix: LoraMatrix) -> TritonLora:
        """Cast an adapter's change of a matrix to the dtype of the op."""
        scales = torch.empty(len(matrix.a), device=matrix.a.device)
        for part in matrix.parts:
            scales[part.first_rank : part.first_rank + part.rank] = part.scale
        cast = LoraMatrix(matrix.a.to(self._dtype).contiguous(), matrix.parts, matrix.out_features)
        return TritonLora(cast, scales, tuple(part.b.to(self._dtype).contiguous() for part in matrix.parts))

    def add(self, y: Tensor, x: Tensor, rows: Tensor, segments: Sequence[LoraSegment]) -> None:
        """As `kernels.lora.add_lora`."""
        check_float("x", x)
        check_contiguous("y", y)
        x, table = x.contiguous(), self._find_table(segments, len(rows), y.device)
        matrices = [each.matrix.matrix for each in segments]
        num_ranks = max(len(each.a) for each in matrices)
        low = torch.empty(len(rows), num_ranks, dtype=torch.float32, device=y.device)
        # Rows that no segment lists have the number of segments; their record has no ranks and no parts.
        shared = (rows, table.row_segments, table.segments)
        weight = _TYPES[self._dtype]
        lora_low_kernel[(len(rows), triton.cdiv(num_ranks, BLOCK_RANK))](
            *(low, x, *shared, num_ranks),
            SIZE=x.shape[1],
            WEIGHT=weight,
            BLOCK_IN=BLOCK_IN,
            BLOCK_RANK=BLOCK_RANK,
            **FUSED,
        )
        widest = max(part.width for each in matrices for part in each.parts)
        largest = next_power_of_2(max(part.rank for each in matrices for part in each.parts))
        grid = (len(rows), max(len(each.parts) for each in matrices), triton.cdiv(widest, BLOCK_OUT))
        lora_add_kernel[grid](
            *(y, low, *shared, table.parts, num_ranks),
            SIZE=y.shape[1],
            WEIGHT=weight,
            BLOCK_OUT=BLOCK_OUT,
            BLOCK_RANK=max(largest, 2),
            **FUSED,
        )

    def _find_table(self, segments: Sequence[LoraSegment], num_rows: int, device: torch.device) -> _Table:
        key = ((num_rows, 0, 0), *((id(matrix), start, end) for matrix, start, end in segments))
        table = self._tables.pop(key, None)
        # The address of an object that was freed may be another's now, so the key alone does not identify a matrix.
        if table is None or [known() for known in table.matrices] != [matrix for matrix, _, _ in segments]:
            table = _make_table(segments, num_rows, device)
        self._tables[key] = table  # the most recently used last
        if len(self._tables) > MAX_TABLES:
            del self._tables[next(iter(self._tables))]
        return table


def _make_table(segments: Sequence[LoraSegment], num_rows: int, device: torch.device) -> _Table:
    row_segments = np.full(num_rows, len(segments))
    records: list[tuple[int, ...]] = []
    parts: list[tuple[int, ...]] = []
    for number, (packed, start, end) in enumerate(segments):
        row_segments[start:end] = number
        matrix: LoraMatrix = packed.matrix
        addresses = (matrix.a.data_ptr(), packed.scales.data_ptr())
        records.append((*addresses, len(matrix.a), len(parts), len(matrix.parts)))
        for part, b in zip(matrix.parts, packed.b, strict=True):
            vectors = [0 if each is None else each.data_ptr() for each in (part.factor, part.offset)]
            parts.append((b.data_ptr(), *vectors, part.start, part.width, part.first_rank, part.rank))
    records.append((0, 0, 0, 0, 0))
    arrays = (row_segments, np.array(records), np.array(parts))
    # Each array starts at a multiple of 16 bytes: Triton compiles another kernel for a pointer that does not.
    padded = [np.pad(array.ravel(), (0, array.size % 2)) for array in arrays]
    sent = upload(np.concatenate(padded), device).split([len(each) for each in padded])
    tensors = (part[: array.size].view(array.shape) for part, array in zip(sent, arrays, strict=True))
    return _Table(tuple(ref(each.matrix) for each in segments), *tensors)
