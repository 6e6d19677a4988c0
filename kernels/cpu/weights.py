"""NativeWeight: a matrix in the panels that the native products read; see `src/panels.h` for the layout."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import IntEnum
from functools import partial

import torch
from torch import Tensor

from kernels.cpu.library import NativeLibrary, ThreadPool
from kernels.cpu.panel_memory import PanelMemory
from kernels.cpu.structs import LinearStruct
from kernels.grouped import GROUP_SIZE, Bits, Convert, Form, GroupedInt, GroupedRows, RoundedRows, cut
from kernels.ops import Quantization

# The codes of `Dtype` in src/linear.h.
DTYPES = {torch.float32: 0, torch.bfloat16: 1}


_PANEL_WIDTH = 32  # of `src/panels.h`
# Bytes of a weight with its share of scales and minimums.
WEIGHT_BYTES: dict[Quantization, float] = {"int8": 34 / 32, "int6": 26 / 32, "int4": 20 / 32}
_BITS: dict[Quantization, Bits] = {"int8": 8, "int6": 6, "int4": 4}
_NUMBERS_AT_ONCE = 2**21  # of a matrix in grouped codes: what is converted stays in the cache until it is packed


class WeightKind(IntEnum):
    """How a matrix is stored; the codes of `WeightKind` in src/linear.h."""

    FLOAT32 = 0
    FLOAT32_HALF = (
        1  # float32 arithmetic over weights that bfloat16 holds exactly: half the memory, same results
    )
    BFLOAT16 = 2
    SPLIT = 3  # float32 as sums of two numbers of bfloat16, for three products on AMX instead of a slower one
    GROUPED4 = 4
    GROUPED6 = 5
    GROUPED8 = 6
    CENTRED4 = 7  # without minimums
    CENTRED6 = 8
    CENTRED8 = 9


@dataclass(frozen=True, slots=True)
class NativeWeight:
    """A packed matrix [out, in]; the tensors own the memory that `struct` points to."""

    kind: WeightKind
    dtype: torch.dtype  # of the matrix that was packed
    in_features: int
    out_features: int
    panels: Tensor
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
    if quantization is not None:
        if quantization not in _BITS:
            raise ValueError(f"quantization={quantization!r} is not available on the CPU; allowed: int8, int4")
        rows = RoundedRows(weight, weight.shape, _BITS[quantization])
        return _pack_grouped(library, pool, memory, rows, bias, dtype)
    weight = weight.contiguous()
    out_features, in_features = weight.shape
    kind = choose_kind(library, pool, weight, dtype) if kind is None else kind
    panels = memory.take(library.packed_bytes(kind, out_features, in_features))
    bias = None if bias is None else bias.float().contiguous()
    pointers = (weight.data_ptr(), DTYPES[weight.dtype], out_features, in_features, panels.data_ptr())
    library.pack_weight(pool.handle, kind, *pointers)
    struct = LinearStruct(panels.data_ptr(), address(bias), in_features, out_features, kind)
    return NativeWeight(kind, dtype, in_features, out_features, panels, bias, struct)


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
    kind = _choose_grouped(weight.form)
    bias = None if bias is None else bias.float().contiguous()
    struct = LinearStruct(None, address(bias), in_features, out_features, kind, weight.form.group_size)
    panels = memory.take(library.grouped_bytes(ctypes.byref(struct)))
    struct.panels = panels.data_ptr()
    panel_bytes = len(panels) // -(-out_features // _PANEL_WIDTH)
    convert = make_convert(library, pool)
    step = max(1, _NUMBERS_AT_ONCE // (_PANEL_WIDTH * in_features)) * _PANEL_WIDTH
    for rows in cut(weight, step, _PANEL_WIDTH):
        part = weight.read(rows, convert)
        codes, scales = part.codes.contiguous(), part.scales.float().contiguous()
        minimums = None if part.minimums is None else part.minimums.float().contiguous()
        assert part.form == weight.form and codes.dtype == torch.int8, f"{part.form} {codes.dtype}"
        part_struct = LinearStruct(None, None, in_features, len(codes), kind, part.group_size)
        pointers = (address(each) for each in (codes, scales, minimums))
        target = panels[rows.start // _PANEL_WIDTH * panel_bytes :]
        library.pack_grouped(pool.handle, ctypes.byref(part_struct), *pointers, target.data_ptr())
    return NativeWeight(kind, dtype, in_features, out_features, panels, bias, struct)


def make_convert(library: NativeLibrary, pool: ThreadPool) -> Convert:
    """Return the library's conversions to grouped codes."""
    return Convert(partial(_round_rows, library, pool), partial(_split_blocks, library, pool))


def _round_rows(
    library: NativeLibrary, pool: ThreadPool, weight: Tensor, bits: Bits, group_size: int = GROUP_SIZE
) -> GroupedInt:
    """As `round_grouped`, to the same bits."""
    values = weight.float().contiguous()
    codes = torch.empty(values.shape, dtype=torch.int8)
    scales = torch.empty(len(values), -(-values.shape[1] // group_size))
    minimums = torch.empty_like(scales) if bits == 4 else None
    pointers = (codes.data_ptr(), scales.data_ptr(), address(minimums))
    library.round_rows(pool.handle, values.data_ptr(), *values.shape, group_size, bits, *pointers)
    return GroupedInt(codes, scales, minimums, group_size, bits)


def _split_blocks(
    library: NativeLibrary, pool: ThreadPool, kind: int, rows: Tensor, num_inputs: int, form: Form
) -> GroupedInt | None:
    """Return the codes of rows of blocks of GGUF, [out, bytes]; None for a type that the library does not know."""
    rows = rows.contiguous()
    codes = torch.empty(len(rows), num_inputs, dtype=torch.int8)
    scales = torch.empty(len(rows), num_inputs // form.group_size)
    minimums = None if form.is_centred else torch.empty_like(scales)
    pointers = (codes.data_ptr(), scales.data_ptr(), address(minimums))
    if not library.split_blocks(pool.handle, kind, rows.data_ptr(), codes.numel(), *pointers):
        return None
    return GroupedInt(codes, scales, minimums, form.group_size, form.bits)


def _choose_grouped(form: Form) -> WeightKind:
    return WeightKind[f"{'CENTRED' if form.is_centred else 'GROUPED'}{form.bits}"]


def estimate_packed_bytes(out_features: int, in_features: int, weight_bytes: float) -> int:
    """Return the bytes that packing a matrix takes at most, each weight in so many bytes."""
    num_outputs, num_inputs = (-(-size // _PANEL_WIDTH) * _PANEL_WIDTH for size in (out_features, in_features))
    return int(num_outputs * num_inputs * weight_bytes)


def unpack(library: NativeLibrary, pool: ThreadPool, packed: NativeWeight) -> Tensor:
    """Return the matrix [out, in] in the dtype it came in, rounded where it was quantized."""
    return unpack_rows(library, pool, packed, torch.arange(packed.out_features)).to(packed.dtype)


def unpack_rows(library: NativeLibrary, pool: ThreadPool, packed: NativeWeight, ids: Tensor) -> Tensor:
    """Return some rows of a matrix, float32 [N, in]."""
    ids = ids.contiguous()
    rows = torch.empty(len(ids), packed.in_features)
    library.unpack_rows(
        pool.handle, ctypes.byref(packed.struct), ids.data_ptr(), len(ids), rows.data_ptr()
    )
    return rows


def address(tensor: Tensor | None) -> int | None:
    """The address of a tensor's memory; None for none."""
    return None if tensor is None else tensor.data_ptr()


def choose_kind(
    library: NativeLibrary, pool: ThreadPool, weight: Tensor, dtype: torch.dtype
) -> WeightKind:
    """Return how to store a contiguous tensor of weights, as they are, for products in a dtype."""
    if weight.dtype == torch.bfloat16:
        return WeightKind.BFLOAT16 if dtype == torch.bfloat16 else WeightKind.FLOAT32_HALF
    is_half = library.fits_bfloat16(pool.handle, weight.data_ptr(), weight.numel())
    return WeightKind.FLOAT32_HALF if is_half else WeightKind.FLOAT32
