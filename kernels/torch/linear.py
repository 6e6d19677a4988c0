"""Products with a weight matrix: packed for the device, as it is or quantized.

int8   CUDA: one scale per output channel, activations rounded per token: int8 times int8, summed in int32
fp8    the same with float8 (e4m3); CUDA only
int4   see `kernels.grouped`; activations rounded to int8 per group; on the CPU int8 too
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.grouped import Bits, GroupedInt, GroupedRows, round_grouped
from kernels.ops import PackedWeight, Quantization
from kernels.scaled import FP8

_GREATEST = {torch.int8: 127.0, FP8: torch.finfo(FP8).max}
_BITS: dict[Quantization, Bits] = {"int8": 8, "int6": 6, "int4": 4}
# CUDA's int8 product requires at least this many rows, and matrix sizes that are multiples of 8.
_MIN_CUDA_ROWS = 32
_INT8_MULTIPLE = 8
TINY = 1e-12


def pack_linear(
    weight: Tensor | GroupedRows,
    bias: Tensor | None,
    quantization: Quantization | None,
    dtype: torch.dtype | None = None,
) -> PackedWeight:
    """Lay a matrix [out, in] out as `linear` wants it on this device.

    Args:
        bias: not part of the packing; other implementations may want it.

    Raises:
        ValueError: this quantization does not work for the matrix on its device.

    Why: on CPU in float32 a column-major matrix makes products of 4 to 16 rows up to three times as fast.
    """
    if not isinstance(weight, Tensor):
        return GroupedIntWeight(weight.read(slice(0, weight.shape[0])))
    weight = weight if dtype is None else weight.to(dtype)
    if quantization is not None:
        return pack_quantized(weight, quantization)
    if weight.device.type == "cpu" and weight.dtype == torch.float32:
        return weight.t().contiguous().t()
    return weight


def unpack_linear(packed: PackedWeight) -> Tensor:
    """Return the matrix [out, in], with the rounding that packing may have done."""
    return packed.unpack() if isinstance(packed, QuantizedWeight) else packed


def linear(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Return x W^T + b: [T, in] -> [T, out], computed in the dtype of x.

    Args:
        weight: from `pack_linear`.
        bias: [out].
        out_dtype: of the result; None: the dtype of x.
    """
    is_quantized = isinstance(weight, QuantizedWeight)
    product = weight.multiply(x, bias) if is_quantized else F.linear(x, weight, bias)
    return product.to(out_dtype or x.dtype)


# (x [N, K], greatest magnitude, dtype) -> values [N, K], scales [N, 1]; see `round_rows`
RoundInputs = Callable[[Tensor, float, torch.dtype], tuple[Tensor, Tensor]]


@runtime_checkable
class QuantizedWeight(Protocol):
    """A matrix in fewer bits."""

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x W^T + b, dtype of x."""

    def unpack(self) -> Tensor:
        """The rounded matrix [out, in]."""


def pack_quantized(
    weight: Tensor, quantization: Quantization, round_inputs: RoundInputs | None = None
) -> QuantizedWeight:
    """Round a matrix [out, in].

    Args:
        round_inputs: rounds activations as `round_rows`, which is the default.

    Raises:
        ValueError: the matrix or its device does not allow it; says what would.
    """
    match quantization:
        case "fp8":
            return ScaledWeight(weight, FP8, round_inputs)
        case "int8" if weight.is_cuda:
            return ScaledWeight(weight, torch.int8, round_inputs)
        case _:
            return GroupedIntWeight(round_grouped(weight, _BITS[quantization]))


class ScaledWeight:
    """W8A8 in int8 or float8: weights rounded per output channel, activations per token.

    Zeros fill sizes of int8 up to multiples of 8.
    """

    def __init__(self, weight: Tensor, dtype: torch.dtype, round_inputs: RoundInputs | None = None) -> None:
        if dtype == FP8 and (weight.shape[0] % 16 or weight.shape[1] % 16):
            raise ValueError(f"fp8 needs both sizes of a matrix divisible by 16, not {list(weight.shape)}")
        self.round = round_inputs or round_rows
        values, scales = round_rows(weight, _GREATEST[dtype], dtype)
        self._num_outputs, self._num_inputs = weight.shape
        self.values = _fill_up(values, *(size + -size % _INT8_MULTIPLE for size in weight.shape))
        self.scales = scales.t().contiguous()  # [1, out] float32
        self._dtype = weight.dtype

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        dtype = self.values.dtype
        values, scales = self.round(x.contiguous(), _GREATEST[dtype], dtype)
        if dtype == FP8:
            result = torch._scaled_mm(values, self.values.t(), scales, self.scales, out_dtype=torch.bfloat16)
        else:
            num_rows = len(values)
            values = _fill_up(values, max(num_rows, _MIN_CUDA_ROWS), self.values.shape[1])
            products = torch._int_mm(values, self.values.t())
            result = (products[:num_rows, : self._num_outputs] * scales).mul_(self.scales)
        return (result if bias is None else result + bias).to(x.dtype)

    def unpack(self) -> Tensor:
        values = self.values[: self._num_outputs, : self._num_inputs]
        return (values.float() * self.scales.t()).to(self._dtype)


class GroupedIntWeight:
    """Codes times activations of 8 bits, slowly: for machines without a compiler, and the reference of native ops."""

    def __init__(self, weight: GroupedInt) -> None:
        self.weight = weight

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        groups = F.pad(x, (0, -x.shape[-1] % self.weight.group_size)).unflatten(
            -1, (-1, self.weight.group_size)
        )
        values, scales = round_rows(groups.flatten(0, 1), _GREATEST[torch.int8])
        rounded = (values * scales).view(len(x), -1)[:, : x.shape[-1]]
        return F.linear(rounded, self.unpack(), None if bias is None else bias.float()).to(x.dtype)

    def unpack(self) -> Tensor:
        return self.weight.dequantize()


def _fill_up(matrix: Tensor, num_rows: int, num_columns: int) -> Tensor:
    """Append rows and columns of zeros up to these numbers."""
    if matrix.shape == (num_rows, num_columns):
        return matrix
    return F.pad(matrix, (0, num_columns - matrix.shape[1], 0, num_rows - matrix.shape[0]))


def round_rows(x: Tensor, greatest: float, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """Scale each row of x [N, K] so that its greatest magnitude becomes `greatest`, and round.

    Returns (values [N, K] of the dtype, scales [N, 1] float32) with values * scales near x.
    """
    scales = x.abs().amax(dim=-1, keepdim=True).float().clamp_(min=TINY).div_(greatest)
    values = x.float().div(scales)
    if dtype == torch.int8:
        values = values.round_()
    return values.clamp_(-greatest, greatest).to(dtype), scales
