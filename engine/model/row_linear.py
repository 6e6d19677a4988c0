"""RowLinear: a product whose inputs are divided over ranks, and whose sums are folded in one order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.comm import fold
from engine.model.adapters import MatrixPart, StepAdapters
from engine.model.formats.encoded import EncodedPart, EncodedTensor, GroupedColumns
from engine.model.linear import Linear, sum_squares
from engine.model.shard import Shard
from engine.model.sharding import Sharding
from engine.model.weight_targets import Targets, WeightTarget, own
from kernels import Ops
from kernels.grouped import GROUP_SIZE, GroupedRows
from kernels.lora import LoraMatrix, LoraSegment, PackedLora
from kernels.ops import Multiply, PackedWeight, Quantization


@dataclass(frozen=True, slots=True)
class RowLora:
    """An adapter's change: x A^T is computed in slices as x W^T is. Then every rank multiplies the sum by all of B."""

    a: list[tuple[Multiply, PackedWeight]]  # columns of each slice
    b: PackedLora  # with an identity as A


class RowLinear(Linear):
    """y = x W^T + b; this rank has a part of x and the same columns of W.

    The columns are multiplied in slices. Their float32 results are added as `fold` does, over all ranks. Those of
    adapters are exchanged together with those of the base model.

    Args:
        in_features: of all ranks together.
    """

    _packs_bias = False

    def __init__(
        self, in_features: int, out_features: int, bias: bool, sharding: Sharding, *, dtype: torch.dtype,
        device: torch.device, int4_as: Quantization,
    ) -> None:
        super().__init__(
            sharding.count(in_features), out_features, bias, dtype=dtype, device=device, int4_as=int4_as
        )
        self._sharding = sharding
        self._shard = Shard(1, in_features, (sharding.part(in_features),))
        self._ends: list[tuple[int, int]] = []  # first input and end of each packed slice
        self._dtype = dtype

    def forward(
        self, x: Tensor, out_dtype: torch.dtype | None = None, adapters: StepAdapters | None = None
    ) -> Tensor:
        changes = [] if adapters is None else adapters.find(self)
        parts = [self._multiply_slices(x, self._packed)]
        for lora, first, last in changes:
            assert adapters is not None, "there are changes"
            parts.append(self._multiply_slices(x.index_select(0, adapters.rows[first:last]), lora.a))
        total, *lows = self._sum(parts)
        if self.bias is not None:
            total += self.bias
        for (lora, first, last), low in zip(changes, lows, strict=True):
            assert adapters is not None, "there are changes"
            spread = low.new_zeros(len(x), low.shape[1])
            spread[adapters.rows[first:last]] = low
            adapters.ops.add_lora(total, spread, adapters.rows, [LoraSegment(lora.b, first, last)])
        return total.to(out_dtype or x.dtype)

    def _multiply_slices(self, x: Tensor, slices: list[tuple[Multiply, PackedWeight]]) -> Tensor:
        """Return the float32 sum of this rank's slices."""
        return fold(
            [
                multiply(x[:, start:end], columns, None, torch.float32)
                for (start, end), (multiply, columns) in zip(self._ends, slices, strict=True)
            ]
        )

    def _sum(self, parts: list[Tensor]) -> list[Tensor]:
        """Return the sums over all ranks, in one exchange."""
        comm = self._sharding.comm
        if comm is None:
            return parts
        if len(parts) == 1:
            return [comm.sum(parts[0])]
        flat = comm.sum(torch.cat([part.flatten() for part in parts]))
        pieces = flat.split([part.numel() for part in parts])
        return [piece.view_as(part) for piece, part in zip(pieces, parts, strict=True)]

    def measure_rows(self, rows: slice, a: Tensor, b: Tensor, scale: float) -> Tensor:
        weight = self.unpack()[rows].cpu()
        return fold([sum_squares(weight[:, start:end], a[:, start:end], b, scale) for start, end in self._ends])

    def pack_lora(self, ops: Ops, matrix: LoraMatrix) -> RowLora:
        a, (part,) = matrix.a.to(self._dtype), matrix.parts
        columns = [a[:, start:end].contiguous() for start, end in self._ends]
        slices = [(ops.linear, ops.pack_linear(each, None, None)) for each in columns]
        identity = torch.eye(len(a), dtype=part.b.dtype, device=a.device)
        return RowLora(slices, ops.pack_lora(replace(matrix, a=identity)))

    def _cut(self, weight: Tensor, quantization: Quantization | None) -> Sequence[Tensor]:
        width = self._choose_width(1 if quantization is None else GROUP_SIZE)
        return weight.split(width, dim=1)

    def _choose_width(self, multiple: int) -> int:
        """Choose the slices, and return the number of inputs of each."""
        width = self.in_features // self._sharding.count_slices(self.in_features, multiple)
        self._ends = [(start, start + width) for start in range(0, self.in_features, width)]
        return width

    def _pack_codes(self, ops: Ops, rows: GroupedRows, dtype: torch.dtype) -> None:
        self._choose_width(GROUP_SIZE)
        slices = (GroupedColumns(rows, start, end) for start, end in self._ends)
        self.take_packed(ops, *(ops.pack_linear(each, None, None, dtype) for each in slices))

    def _keep_codes(self, tensor: EncodedTensor) -> None:
        self.keep("", EncodedPart(tensor, self._shard))

    def _join(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts), dim=1)

    def weight_targets(self) -> Targets:
        assert self.weight is not None, "weights are loaded before they are packed"
        part = MatrixPart(self, 0, self.out_features, None, self._shard)
        # Codes of narrower slices are decoded, because any number of ranks must multiply the same slices.
        width = self.in_features // self._sharding.count_slices(self.in_features, 1)
        keep = None if width % GROUP_SIZE else self._keep_codes
        targets = {"weight": WeightTarget(self.weight, self._shard, keep_codes=keep, part=part)}
        if self.bias is not None:
            targets["bias"] = WeightTarget(self.bias)
        return own(targets, self)


def make_row_linear(
    in_features: int, out_features: int, bias: bool, sharding: Sharding, dtype: torch.dtype,
    device: torch.device, int4_as: Quantization = "int4",
) -> Linear:
    """Return a plain layer for one rank, or one that is computed in slices."""
    if sharding.size == 1 and not sharding.is_sliced:
        return Linear(in_features, out_features, bias, dtype=dtype, device=device, int4_as=int4_as)
    return RowLinear(in_features, out_features, bias, sharding, dtype=dtype, device=device, int4_as=int4_as)
