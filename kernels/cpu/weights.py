"""NativeWeight: a matrix in the panels that the native products read; see `src/panels.h` for the layout."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from kernels.cpu.library import NativeLibrary, ThreadPool
from kernels.cpu.panel_memory import PanelMemory
from kernels.cpu.structs import LinearStruct
from kernels.grouped import GROUP_SIZE, GroupedRows, RoundedRows
from kernels.ops import Quantization

# The codes of `Dtype` in src/linear.h.
DTYPES = {torch.float32: 0, torch.bfloat16: 1}


_PANEL_WIDTH = 32  # of `src/panels.h`
_WORD_BYTES = 4
_NUMBERS_AT_ONCE = 2**20  # of a matrix in grouped codes: what is converted stays in the cache until it is packed


class WeightKind(IntEnum):
    """How a matrix is stored; the codes of `WeightKind` in src/linear.h."""

    FLOAT32 = 0
    FLOAT32_HALF = (
        1  # float32 arithmetic over weights that bfloat16 holds exactly: half the memory, same results
    )
    BFLOAT16 = 2
    INT8 = 3
    GROUPED4 = 4
    GROUPED8 = 5


@dataclass(frozen=True, slots=True)
class NativeWeight:
    """A packed matrix [out, in]; the tensors own the memory that `struct` points to."""

    kind: WeightKind
    dtype: torch.dtype  # of the matrix that was packed
    in_features: int
    out_features: int
    panels: Tensor
    scales: Tensor | None  # [out] float32, INT8 only
    corrections: Tensor | None  # [out] int32, INT8 only
    bias: Tensor | None  # [out] float32
    struct: LinearStruct

    @property
    def num_bytes(self) -> int:
        """Bytes that a product with this matrix reads."""
        return self.panels.numel()


def pack(
    library: NativeLibrary,
    pool: ThreadPool,
    memory: PanelMemory,
    weight: Tensor | GroupedRows,
    bias: Tensor | None,
    quantization: Quantization | None,
    kind: WeightKind | None = None,
    dtype: torch.dtype | None = None,
) -> NativeWeight:
    """Pack a matrix [out, in] into a piece of `memory`; one in grouped codes keeps them.

    Args:
        kind: how to store it; None: `choose_kind` decides.
        dtype: in which the products are computed; None: that of the matrix.

    Raises:
        ValueError: another dtype than float32 and bfloat16, or another quantization than int8 and int4.
    """
    if not isinstance(weight, Tensor):
        return _pack_grouped(library, pool, memory, weight, bias, dtype or torch.float32)
    dtype = dtype or weight.dtype
    if weight.dtype != torch.bfloat16 or dtype != torch.float32:
        weight = weight.to(dtype)  # float32 products with a bfloat16 matrix need no copy of it
    if weight.dtype not in DTYPES or weight.dim() != 2 or weight.device.type != "cpu":
        raise ValueError(
            "native ops take float32 and bfloat16 matrices on the CPU, "
            f"not {weight.dtype} {list(weight.shape)} on {weight.device.type}"
        )
    if quantization == "int4":
        rows = RoundedRows(weight.__getitem__, weight.shape)
        return _pack_grouped(library, pool, memory, rows, bias, dtype)
    weight = weight.contiguous()
    out_features, in_features = weight.shape
    kind = choose_kind(library, pool, weight, quantization, dtype) if kind is None else kind
    panels = memory.take(library.packed_bytes(kind, out_features, in_features))
    scales = torch.empty(out_features) if kind == WeightKind.INT8 else None
    corrections = torch.empty(out_features, dtype=torch.int32) if kind == WeightKind.INT8 else None
    bias = None if bias is None else bias.float().contiguous()
    library.pack_weight(
        pool.handle,
        kind,
        weight.data_ptr(),
        DTYPES[weight.dtype],
        out_features,
        in_features,
        panels.data_ptr(),
        address(scales),
        address(corrections),
    )
    struct = LinearStruct(
        panels.data_ptr(),
        address(scales),
        address(corrections),
        address(bias),
        in_features,
        out_features,
        kind,
    )
    return NativeWeight(
        kind, dtype, in_features, out_features, panels, scales, corrections, bias, struct
    )


def _pack_grouped(
    library: NativeLibrary,
    pool: ThreadPool,
    memory: PanelMemory,
    weight: GroupedRows,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> NativeWeight:
    """Pack a matrix some panels at a time."""
    out_features, in_features = weight.shape
    kind = WeightKind.GROUPED4 if weight.bits == 4 else WeightKind.GROUPED8
    sizes = (out_features, in_features, weight.group_size)
    panels = memory.take(library.grouped_bytes(kind, *sizes))
    step = max(1, _NUMBERS_AT_ONCE // (_PANEL_WIDTH * in_features)) * _PANEL_WIDTH
    for start in range(0, out_features, step):
        part = weight.read(slice(start, min(start + step, out_features)))
        codes = part.codes.contiguous()
        scales, minimums = part.scales.float().contiguous(), part.minimums.float().contiguous()
        pointers = (codes.data_ptr(), scales.data_ptr(), minimums.data_ptr())
        target = panels[library.grouped_bytes(kind, start, *sizes[1:]) :]
        library.pack_grouped(pool.handle, kind, *pointers, len(codes), *sizes[1:], target.data_ptr())
    bias = None if bias is None else bias.float().contiguous()
    struct = LinearStruct(
        *(panels.data_ptr(), None, None, address(bias), in_features, out_features),
        *(kind, weight.group_size),
    )
    return NativeWeight(kind, dtype, in_features, out_features, panels, None, None, bias, struct)


def estimate_int4_bytes(out_features: int, in_features: int) -> int:
    """Return the bytes that a matrix takes after rounding to int4."""
    num_groups = -(-in_features // GROUP_SIZE)
    return -(-out_features // _PANEL_WIDTH) * _PANEL_WIDTH * num_groups * (GROUP_SIZE // 2 + _WORD_BYTES)


def estimate_packed_bytes(out_features: int, in_features: int, itemsize: int) -> int:
    """Return the bytes that packing a matrix takes at most, its numbers in so many bytes each: 1 where it is int8."""
    panels = -(-out_features // _PANEL_WIDTH) * _PANEL_WIDTH * -(-in_features // _WORD_BYTES) * _WORD_BYTES
    return panels * itemsize + (2 * _WORD_BYTES * out_features if itemsize == 1 else 0)


def unpack(library: NativeLibrary, pool: ThreadPool, packed: NativeWeight) -> Tensor:
    """Return the matrix [out, in] in the dtype it came in, rounded where it was quantized."""
    weight = torch.empty(packed.out_features, packed.in_features)
    library.unpack_weight(pool.handle, ctypes.byref(packed.struct), weight.data_ptr())
    return weight.to(packed.dtype)


def address(tensor: Tensor | None) -> int | None:
    """The address of a tensor's memory; None for none."""
    return None if tensor is None else tensor.data_ptr()


def choose_kind(
    library: NativeLibrary,
    pool: ThreadPool,
    weight: Tensor,
    quantization: Quantization | None,
    dtype: torch.dtype,
) -> WeightKind:
    """Return how to store a contiguous tensor of weights for products in a dtype.

    Raises:
        ValueError: another quantization than int8; int4 is for linear layers, see `pack`.
    """
    if quantization not in (None, "int8"):
        raise ValueError(
            f"quantization={quantization!r} is not available in native ops; allowed: int8, int4 without experts"
        )
    if quantization == "int8":
        return WeightKind.INT8
    if weight.dtype == torch.bfloat16:
        return WeightKind.BFLOAT16 if dtype == torch.bfloat16 else WeightKind.FLOAT32_HALF
    is_half = library.fits_bfloat16(pool.handle, weight.data_ptr(), weight.numel())
    return WeightKind.FLOAT32_HALF if is_half else WeightKind.FLOAT32
