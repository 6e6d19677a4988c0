"""Low-rank products of adapters: two launches per matrix, whatever the number of adapters.

A program computes one row, so its sums have one order in any batch. It finds the matrices of its adapter through a
table of addresses. An entry is (A, scales, ranks, number of parts), and for each part (B, factor, offset, start, width,
first rank, rank).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.lora import LoraLimits, LoraMatrix, LoraSegment
from kernels.triton.launch import FUSED, check_contiguous, check_float, next_power_of_2
from kernels.upload import upload

BLOCK_IN, BLOCK_RANK, BLOCK_OUT = 256, 16, 64
_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit
def lora_low_kernel(
    low_ptr: tl.tensor,
    x_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    numbers_ptr: tl.tensor,
    table_ptr: tl.tensor,
    table_stride: int,
    low_stride: int,
    SIZE: tl.constexpr,
    WEIGHT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64)
    record = table_ptr + tl.load(numbers_ptr + place) * table_stride
    a = tl.load(record).to(tl.pointer_type(WEIGHT))
    scales = tl.load(record + 1).to(tl.pointer_type(tl.float32))
    ranks = tl.program_id(1) * BLOCK_RANK + tl.arange(0, BLOCK_RANK).to(tl.int64)
    num_ranks = tl.load(record + 2)
    if tl.program_id(1) * BLOCK_RANK < num_ranks:
        is_rank = ranks < num_ranks
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
    numbers_ptr: tl.tensor,
    table_ptr: tl.tensor,
    table_stride: int,
    low_stride: int,
    SIZE: tl.constexpr,
    WEIGHT: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64)
    record = table_ptr + tl.load(numbers_ptr + place) * table_stride
    if tl.program_id(1) < tl.load(record + 3):
        part = record + 4 + tl.program_id(1) * 7
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


@dataclass(eq=False, frozen=True, slots=True)
class TritonLora:
    """An adapter's change of a matrix; all tensors share one dtype."""

    matrix: LoraMatrix
    scales: Tensor  # [ranks] float32
    b: tuple[Tensor, ...]


class LoraOp:
    """Packs adapters and adds their products, in the dtype of one engine."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def pack(self, matrix: LoraMatrix) -> TritonLora:
        """Cast an adapter's change of a matrix to the dtype of the op."""
        scales = torch.empty(len(matrix.a), device=matrix.a.device)
        for part in matrix.parts:
            scales[part.first_rank : part.first_rank + part.rank] = part.scale
        cast = LoraMatrix(matrix.a.to(self._dtype).contiguous(), matrix.parts, matrix.out_features)
        return TritonLora(cast, scales, tuple(part.b.to(self._dtype).contiguous() for part in matrix.parts))

    def add(self, y: Tensor, x: Tensor, rows: Tensor, segments: Sequence[LoraSegment]) -> None:
        """Implement `kernels.lora.add_lora`."""
        parts = [part for each in segments for part in each.matrix.matrix.parts]
        limits = LoraLimits(
            max(len(each.matrix.b) for each in segments),
            max(part.rank for part in parts),
            max(part.width for part in parts),
        )
        # The last entry is empty: it serves rows without an adapter.
        table = np.zeros((len(segments) + 1, limits.num_words), dtype=np.int64)
        numbers = np.full(len(rows), len(segments))
        for number, (packed, start, end) in enumerate(segments):
            entry = self.encode(packed)
            table[number, : len(entry)], numbers[start:end] = entry, number
        sent, numbers_sent = upload(np.concatenate((table.ravel(), numbers)), y.device).split((table.size, len(rows)))
        self.add_listed(y, x, rows, numbers_sent, sent.view(table.shape), limits)

    def encode(self, packed: TritonLora) -> list[int]:
        """See `kernels.lora.LoraTables`."""
        matrix = packed.matrix
        entry = [matrix.a.data_ptr(), packed.scales.data_ptr(), len(matrix.a), len(matrix.parts)]
        for part, b in zip(matrix.parts, packed.b, strict=True):
            vectors = [0 if each is None else each.data_ptr() for each in (part.factor, part.offset)]
            entry += (b.data_ptr(), *vectors, part.start, part.width, part.first_rank, part.rank)
        return entry

    def add_listed(
        self, y: Tensor, x: Tensor, rows: Tensor, numbers: Tensor, table: Tensor, limits: LoraLimits
    ) -> None:
        """See `kernels.lora.LoraTables`."""
        check_float("x", x)
        check_contiguous("y", y)
        x, num_ranks, weight = x.contiguous(), limits.num_parts * limits.rank, _TYPES[self._dtype]
        low = torch.empty(len(rows), num_ranks, dtype=torch.float32, device=y.device)
        listed = (rows, numbers, table, table.stride(0), num_ranks)
        lora_low_kernel[(len(rows), triton.cdiv(num_ranks, BLOCK_RANK))](
            *(low, x, *listed), SIZE=x.shape[1], WEIGHT=weight, BLOCK_IN=BLOCK_IN, BLOCK_RANK=BLOCK_RANK, **FUSED
        )
        lora_add_kernel[(len(rows), limits.num_parts, triton.cdiv(limits.width, BLOCK_OUT))](
            *(y, low, *listed),
            SIZE=y.shape[1],
            WEIGHT=weight,
            BLOCK_OUT=BLOCK_OUT,
            BLOCK_RANK=max(next_power_of_2(limits.rank), 2),
            **FUSED,
        )
