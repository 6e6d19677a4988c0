"""Native layers with states: their operands are checked, then C++ runs them token after token."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.library import NativeLibrary, ThreadPool
from kernels.cpu.structs import ConvStruct, ScanStruct, SegmentsStruct
from kernels.cpu.weights import address
from kernels.states import CONV_WIDTHS, ScanWeights, StateSegments


def run_conv(
    library: NativeLibrary,
    pool: ThreadPool,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    segments: StateSegments,
    *,
    has_silu: bool,
) -> Tensor:
    """As `kernels.states.RunConv`; a token has the same bits in any run."""
    num_tokens, channels = x.shape
    width = weight.shape[0]
    assert width in CONV_WIDTHS, f"a convolution of {width} inputs; possible: {CONV_WIDTHS}"
    assert x.stride(1) == 1 and states.shape[1:] == (width - 1, channels) and weight.shape[1] == channels
    _check_float32(x, weight, bias, states)
    out = torch.empty(num_tokens, channels)
    struct = ConvStruct(
        *map(address, (x, weight, bias, states, out)), x.stride(0), channels, width, has_silu, 0
    )
    library.conv(pool.handle, ctypes.byref(struct), ctypes.byref(find_segments(segments, states.shape[0], num_tokens)))
    return out


def scan_states(
    library: NativeLibrary,
    pool: ThreadPool,
    mixed: Tensor,
    dt: Tensor,
    beta: Tensor | None,
    weights: ScanWeights,
    states: Tensor,
    segments: StateSegments,
) -> Tensor:
    """As `kernels.states.ScanStates`; a token has the same bits in any run."""
    num_tokens = mixed.shape[0]
    dt, beta = dt.contiguous(), None if beta is None else beta.contiguous()
    heads = (num_tokens, weights.num_heads)
    assert dt.shape == heads and (beta is None or beta.shape == heads), "step sizes are [T, H]"
    assert states.shape[1:] == (weights.num_heads, weights.key_size, weights.value_size)
    tensors = (mixed, dt, beta, weights.a_log, weights.dt_bias, weights.skip, states)
    _check_float32(*tensors)
    assert all(tensor is None or tensor.is_contiguous() for tensor in tensors), "operands are contiguous"
    out = torch.empty(num_tokens, weights.num_heads * weights.value_size)
    struct = ScanStruct(
        *map(address, (*tensors, out)),
        *(mixed.shape[1], weights.query_at, weights.key_at, weights.value_at),
        *(weights.num_heads, weights.num_groups, weights.key_size, weights.value_size),
    )
    library.scan(pool.handle, ctypes.byref(struct), ctypes.byref(find_segments(segments, states.shape[0], num_tokens)))
    return out


@dataclass(frozen=True, slots=True)
class NativeSegments:
    """Segments as C sees them, checked for this many slots and tokens."""

    struct: SegmentsStruct
    num_slots: int
    num_tokens: int


def find_segments(segments: StateSegments, num_slots: int, num_tokens: int) -> SegmentsStruct:
    """Return the segments of a step as C sees them; they are checked once for all layers.

    The arrays must outlive the structure.
    """
    found: NativeSegments | None = segments.native
    if found is None or (found.num_slots, found.num_tokens) != (num_slots, num_tokens):
        _check_segments(segments, num_slots, num_tokens)
        arrays = (segments.source, segments.target, segments.first, segments.count, segments.run_ends)
        struct = SegmentsStruct(*(array.ctypes.data for array in arrays), len(segments.run_ends))
        segments.native = found = NativeSegments(struct, num_slots, num_tokens)
    return found.struct


def _check_segments(segments: StateSegments, num_slots: int, num_tokens: int) -> None:
    for array in (segments.source, segments.target, segments.first, segments.count, segments.run_ends):
        assert array.dtype == np.int64 and array.flags.c_contiguous, "segments are int64"
    is_inside = segments.source.max() < num_slots and segments.target.min() >= 0
    assert is_inside and segments.target.max() < num_slots, f"slots must be below {num_slots}"
    assert segments.first.min() >= 0 and (segments.first + segments.count).max() <= num_tokens


def _check_float32(*tensors: Tensor | None) -> None:
    for tensor in tensors:
        assert tensor is None or tensor.dtype == torch.float32, f"states need float32, not {tensor.dtype}"
