"""RowLinear: a product whose inputs are divided over ranks, and whose sums are folded in one order."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.model.adapters import StepAdapters
from engine.model.linear import Linear
from engine.model.shard import Shard, ShardedTarget
from engine.model.sharding import Sharding
from engine.model.weight_targets import Targets
from engine.parallel.comm import fold
from kernels import Ops
from kernels.int4 import GROUP_SIZE
from kernels.ops import Multiply, PackedWeight, Quantization


class RowLinear(Linear):
    """y = x W^T + b; this rank has a part of x and the same columns of W.

    The columns are multiplied in slices. Their float32 results are added as `fold` does, over all ranks.

    Args:
        in_features: of all ranks together.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        sharding: Sharding,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(sharding.count(in_features), out_features, bias, dtype=dtype, device=device)
        self._sharding = sharding
        self._shard = Shard(1, in_features, (sharding.part(in_features),))
        self._slices: list[tuple[int, int, PackedWeight]] = []  # (first input, end, packed columns)
        self._multiply: Multiply | None = None

    def forward(
        self, x: Tensor, out_dtype: torch.dtype | None = None, adapters: StepAdapters | None = None
    ) -> Tensor:
        multiply = self._multiply
        assert adapters is None, "EngineConfig refuses adapters of several ranks"
        assert multiply is not None, "weights are packed before the first step"
        total = fold(
            [multiply(x[:, start:end], columns, None, torch.float32) for start, end, columns in self._slices]
        )
        if self._sharding.comm is not None:
            total = self._sharding.comm.sum(total)
        if self.bias is not None:
            total += self.bias
        return total.to(out_dtype or x.dtype)

    def pack(self, ops: Ops, quantization: Quantization | None) -> None:
        """As `Linear.pack`."""
        assert self.weight is not None, "a layer is packed once; after that it is repacked"
        self._pack_slices(self.weight.data, ops, quantization)
        self.weight = None

    def repack(self, old: Ops, new: Ops, quantization: Quantization | None) -> None:
        """As `Linear.repack`."""
        assert old.unpack_linear is not None, f"weights packed by {old.name} cannot be unpacked"
        weight = torch.cat([old.unpack_linear(columns) for _, _, columns in self._slices], dim=1)
        self._pack_slices(weight, new, quantization)

    def _pack_slices(self, weight: Tensor, ops: Ops, quantization: Quantization | None) -> None:
        num_inputs = weight.shape[1]
        multiple = GROUP_SIZE if quantization == "int4" else 1
        width = num_inputs // self._sharding.count_slices(num_inputs, multiple)
        self._slices = [
            (
                start,
                start + width,
                ops.pack_linear(weight[:, start : start + width].contiguous(), None, quantization),
            )
            for start in range(0, num_inputs, width)
        ]
        self._multiply = ops.linear

    def weight_targets(self) -> Targets:
        """Return the memory for each checkpoint tensor."""
        targets = super().weight_targets()
        targets["weight"] = ShardedTarget(targets["weight"], self._shard)
        return targets


def make_row_linear(
    in_features: int,
    out_features: int,
    bias: bool,
    sharding: Sharding,
    dtype: torch.dtype,
    device: torch.device,
) -> Linear:
    """Return a plain layer for one rank, or one that is computed in slices."""
    if sharding.size == 1 and not sharding.is_sliced:
        return Linear(in_features, out_features, bias, dtype=dtype, device=device)
    return RowLinear(in_features, out_features, bias, sharding, dtype=dtype, device=device)
