"""Linear layers; several checkpoint matrices may be stacked into one product."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from engine.model.adapters import MatrixPart, StepAdapters
from engine.model.formats.encoded import EncodedTensor
from engine.model.shard import Shard
from engine.model.weight_targets import Targets, WeightTarget, own
from kernels import Ops
from kernels.grouped import Bits, ChangedRows, GroupedRows, StackedRows, align
from kernels.lora import LoraMatrix, PackedLora
from kernels.ops import Multiply, PackedWeight, Quantization
from kernels.torch.linear import linear


class Linear(nn.Module):
    """y = x W^T + b. The loader fills the weights; then they are packed for the ops.

    Args:
        in_features, out_features: sizes of x and y.
        parts: name and rows of each checkpoint matrix stacked into W, in order; default: one, named "".
        orders: for parts whose rows are stored in another order: the checkpoint's row of each stored row.
        shards: for parts of which this rank holds some rows: which rows of the checkpoint's.
        shared: use this matrix, which another layer keeps using, instead of allocating one.
        is_quantized: whether the quantization of the model applies to the matrix.
        int4_as: how the matrix is rounded in an int4 model: in more bits where 4 harm most.
    """

    _packs_bias = True  # the bias is added by the product

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        parts: dict[str, int] | None = None,
        *,
        dtype: torch.dtype,
        device: torch.device,
        orders: dict[str, Tensor] | None = None,
        shards: dict[str, Shard] | None = None,
        shared: Tensor | None = None,
        is_quantized: bool = True,
        int4_as: Quantization = "int4",
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self._parts = parts or {"": out_features}
        self._orders = orders or {}
        self._shards = shards or {}
        self._shared = shared
        self._is_quantized = is_quantized
        self._int4_as = int4_as
        self.weight: nn.Parameter | None = None
        if shared is None:
            self.weight = make_parameter(out_features, in_features, dtype=dtype, device=device)
        self.bias = make_parameter(out_features, dtype=dtype, device=device) if bias else None
        self._given: dict[str, Tensor | EncodedTensor] = {}  # parts as the checkpoint has them, until it is packed
        # Each packed matrix is beside its op, because layers move to other ops while steps run. Others have slices.
        self._packed: list[tuple[Multiply, PackedWeight]] = [
            (linear, self.weight if shared is None else shared)
        ]
        self._unpack: Callable[[PackedWeight], Tensor] | None = None

    def forward(
        self, x: Tensor, out_dtype: torch.dtype | None = None, adapters: StepAdapters | None = None
    ) -> Tensor:
        multiply, packed = self._packed[0]
        y = multiply(x, packed, self.bias, out_dtype)
        if adapters is not None:
            adapters.change(self, x, y)
        return y

    @property
    def packed(self) -> PackedWeight:
        return self._packed[0][1]

    @property
    def is_packed(self) -> bool:
        return self._unpack is not None

    def list_packed(self) -> list[PackedWeight]:
        return [packed for _, packed in self._packed]

    def pack(self, ops: Ops, quantization: Quantization | None) -> None:
        """Convert the loaded matrix to the layout of the ops. Earlier views of it become invalid.

        Raises:
            ValueError: the matrix does not allow this quantization.
        """
        quantization = self.choose_quantization(quantization)
        source = self._shared if self.weight is None else self.weight
        assert source is not None, "a layer is packed once; after that it is repacked"
        # Parts that were kept are not in the memory.
        must_pack = self._shared is None or quantization is not None or ops.packs_shared or bool(self._given)
        matrix = self._join_parts(source.data, quantization)
        if not isinstance(matrix, Tensor):
            self._pack_codes(ops, matrix, source.dtype)
        elif must_pack:
            self._pack_values(ops, matrix, quantization, source.dtype)
        else:
            self.take_packed(ops, source.data)

    def _pack_values(
        self, ops: Ops, weight: Tensor, quantization: Quantization | None, dtype: torch.dtype | None = None
    ) -> None:
        bias = self.bias if self._packs_bias else None
        parts = self._cut(weight, quantization)
        self.take_packed(ops, *(ops.pack_linear(each.contiguous(), bias, quantization, dtype) for each in parts))

    def _pack_codes(self, ops: Ops, rows: GroupedRows, dtype: torch.dtype) -> None:
        self.take_packed(ops, ops.pack_linear(rows, self.bias, None, dtype))

    def _cut(self, weight: Tensor, quantization: Quantization | None) -> Sequence[Tensor]:
        """Return what is packed apart."""
        return [weight]

    def _join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the matrix of these parts."""
        return parts[0]

    def choose_quantization(self, quantization: Quantization | None) -> Quantization | None:
        """Return how the matrix is rounded in a model of this quantization."""
        if not self._is_quantized:
            return None
        return self._int4_as if quantization == "int4" else quantization

    def take_packed(self, ops: Ops, *packed: PackedWeight) -> None:
        """Take the matrix in the layout of the ops, in place of `pack`."""
        self._packed, self._unpack = [(ops.linear, each) for each in packed], ops.unpack_linear
        self.weight = None

    def unpack(self) -> Tensor:
        """Return the matrix [out, in] that products use, rounded if it is quantized."""
        assert self._unpack is not None, "these ops cannot unpack a matrix"
        return self._join([self._unpack(packed) for _, packed in self._packed])

    def measure_rows(self, rows: slice, a: Tensor, b: Tensor, scale: float) -> Tensor:
        """Return the squared lengths of rows of W + scale b a, as far as this rank has them, float32."""
        return sum_squares(self.unpack()[rows].cpu(), a, b, scale)

    def pack_lora(self, ops: Ops, matrix: LoraMatrix) -> PackedLora:
        """Convert an adapter's change of the matrix to the layout of the ops."""
        return ops.pack_lora(matrix)

    def keep(self, part: str, tensor: Tensor | EncodedTensor) -> None:
        """Take a part of the matrix as it is, until the matrix is packed."""
        self._given[part] = tensor

    def _join_parts(self, memory: Tensor, quantization: Quantization | None) -> Tensor | GroupedRows:
        """Return the matrix in the codes of its parts, or its values if some part has no codes.

        Codes of more bits than the quantization has are rounded again.
        """
        given, self._given = self._given, {}
        if not given:
            return memory
        parts = [(given[part], self._find_rows(part)) for part in self._parts]
        is_coded = [not isinstance(tensor, Tensor) for tensor, _ in parts]
        if not all(is_coded) and not (quantization is not None and any(is_coded)):
            values = [_read_values(tensor, order) for tensor, order in parts]
            return values[0] if len(values) == 1 else torch.cat(values)
        sources = [_order_rows(tensor, order) for tensor, order in parts]
        return StackedRows(align(sources, find_most_bits(quantization)))

    def _find_rows(self, part: str) -> Tensor | None:
        """Return the checkpoint's row of each row of a part; None: as they are."""
        order, shard = self._orders.get(part), self._shards.get(part)
        if shard is None:
            return order
        rows = shard.take(torch.arange(shard.size))
        return rows if order is None else rows[order]

    def repack(self, old: Ops, new: Ops, quantization: Quantization | None) -> None:
        if self._shared is not None:
            self.pack(new, quantization)
            return
        self._pack_values(new, self.unpack(), self.choose_quantization(quantization))

    def weight_targets(self) -> Targets:
        """Return the memory for each checkpoint tensor, `part.weight` and `part.bias`: views of the parameters."""
        assert self.weight is not None, "weights are loaded before they are packed"
        targets: Targets = {}
        row = 0
        for part, rows in self._parts.items():
            prefix, order = f"{part}." if part else "", self._orders.get(part)
            memory = self.weight[row : row + rows]
            shard = self._shards.get(part)
            matrix_part = MatrixPart(self, row, rows, order, shard)
            keep = partial(self.keep, part)
            targets[f"{prefix}weight"] = WeightTarget(memory, shard, order=order, keep=keep, part=matrix_part)
            if self.bias is not None:
                targets[f"{prefix}bias"] = WeightTarget(self.bias[row : row + rows], shard, order=order)
            row += rows
        return own(targets, self)


def find_most_bits(quantization: Quantization | None) -> Bits:
    """Return the bits of codes that a model of this quantization keeps; codes of more are rounded."""
    return 6 if quantization == "int6" else 4 if quantization == "int4" else 8


def _read_values(tensor: Tensor | EncodedTensor, order: Tensor | None) -> Tensor:
    values = tensor if isinstance(tensor, Tensor) else tensor.dequantize()
    return values if order is None else values.index_select(0, order)


def _order_rows(tensor: Tensor | EncodedTensor, order: Tensor | None) -> Tensor | GroupedRows:
    if isinstance(tensor, Tensor):
        return _read_values(tensor, order)
    rows = tensor.to_grouped()
    return rows if order is None else ChangedRows(rows, rows.form, order)


def sum_squares(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return the squared length of each row of weight + scale b a, float32."""
    return (weight.float() + scale * (b.float() @ a.float())).square_().sum(dim=1)


def pack_linears(module: nn.Module, ops: Ops) -> None:
    """Convert the matrices of a module to the layout of the ops, without quantization."""
    for each in module.modules():
        if isinstance(each, Linear):
            each.pack(ops, None)


def repack_linears(module: nn.Module, old: Ops, new: Ops) -> Iterator[None]:
    """Move the matrices of a module to other ops, one per iteration."""
    for each in module.modules():
        if isinstance(each, Linear):
            each.repack(old, new, None)
            yield


def make_parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
