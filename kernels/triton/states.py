"""Short convolutions of all runs, and gated linear recurrences of decodes and of the few tokens of a run with drafts.

A program owns some channels, or some columns of a head's state, and walks through the segments of a run, so a token has
the same bits in any batch. Recurrences of longer runs, those of prompts, go to torch, which computes them in chunks.
Segments are read from the device alone, so a recorded launch serves other runs; a run that pads has no segments.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

import kernels.torch.states as torch_states
from kernels.states import ScanWeights, StateSegments
from kernels.triton.launch import FUSED, check_contiguous, check_rows, next_power_of_2

MAX_TOKENS = 32  # of a run that is not computed in chunks
BLOCK_V = 32  # columns of a program
BLOCK_C = 128  # channels of a program
SHORT_TOKENS, LONG_TOKENS = 4, 32  # of a run that a convolution computes at once


@triton.jit
def run_conv_kernel(
    out_ptr: tl.tensor,
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    states_ptr: tl.tensor,
    segments_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    x_stride: tl.tensor,
    CHANNELS: tl.constexpr,
    KEPT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SILU: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    """Convolve one run, then write the last KEPT inputs of each of its segments."""
    run = tl.program_id(0)
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    in_row = channels < CHANNELS
    begin, end = tl.load(bounds_ptr + run), tl.load(bounds_ptr + run + 1)
    source, first = tl.load(segments_ptr + begin * 4), tl.load(segments_ptr + begin * 4 + 2)
    final = segments_ptr + tl.maximum(end - 1, 0) * 4
    stop = tl.where(begin < end, tl.load(final + 2) + tl.load(final + 3), first)
    # The inputs before the run, the newest first.
    kept = states_ptr + tl.maximum(source, 0) * KEPT * CHANNELS + channels
    is_kept = channels < tl.where(source >= 0, CHANNELS, 0)
    before1 = tl.load(kept + (KEPT - 1) * CHANNELS, mask=is_kept, other=0.0)
    before2, before3 = before1, before1
    if KEPT > 1:
        before2 = tl.load(kept + (KEPT - 2) * CHANNELS, mask=is_kept, other=0.0)
    if KEPT > 2:
        before3 = tl.load(kept + (KEPT - 3) * CHANNELS, mask=is_kept, other=0.0)
    for start in range(first, stop, BLOCK_T):
        tokens = start + tl.arange(0, BLOCK_T)
        total = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
        if HAS_BIAS:
            total += tl.load(bias_ptr + channels, mask=in_row, other=0.0)[None, :]
        for tap in tl.static_range(KEPT + 1):
            place = tokens - (KEPT - tap)
            is_input = ((place >= first) & (place < stop))[:, None] & in_row[None, :]
            value = tl.load(x_ptr + place[:, None] * x_stride + channels[None, :], mask=is_input, other=0.0)
            distance = (first - place)[:, None]
            value = tl.where(distance == 1, before1[None, :], value)
            value = tl.where(distance == 2, before2[None, :], value)
            value = tl.where(distance == 3, before3[None, :], value)
            total += value * tl.load(weight_ptr + tap * CHANNELS + channels, mask=in_row, other=0.0)[None, :]
        if HAS_SILU:
            total = total / (1.0 + tl.exp(-total))
        mask = (tokens < stop)[:, None] & in_row[None, :]
        tl.store(out_ptr + tokens[:, None] * CHANNELS + channels[None, :], total, mask=mask)
    tl.debug_barrier()  # a target may be the source
    for segment in range(begin, end):
        part = segments_ptr + segment * 4
        until = tl.load(part + 2) + tl.load(part + 3)
        target = states_ptr + tl.load(part + 1) * KEPT * CHANNELS + channels
        for row in tl.static_range(KEPT):
            place = until - KEPT + row
            is_input = channels < tl.where(place >= first, CHANNELS, 0)
            value = tl.load(x_ptr + place * x_stride + channels, mask=is_input, other=0.0)
            distance = first - place
            value = tl.where(distance == 1, before1, value)
            value = tl.where(distance == 2, before2, value)
            value = tl.where(distance == 3, before3, value)
            tl.store(target + row * CHANNELS, value, mask=in_row)


@triton.jit
def scan_states_kernel(
    out_ptr: tl.tensor,
    mixed_ptr: tl.tensor,
    dt_ptr: tl.tensor,
    beta_ptr: tl.tensor,
    a_log_ptr: tl.tensor,
    dt_bias_ptr: tl.tensor,
    skip_ptr: tl.tensor,
    states_ptr: tl.tensor,
    segments_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    step_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    QUERY_AT: tl.constexpr,
    KEY_AT: tl.constexpr,
    VALUE_AT: tl.constexpr,
    CHANNELS: tl.constexpr,
    IS_DELTA: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    MAX_TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """Walk through one run; a segment is (source, target, first token, number of tokens), all int64."""
    run, head = tl.program_id(0), tl.program_id(1)
    rows = tl.arange(0, BLOCK_K)
    columns = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_rows, in_columns = rows < KEY_SIZE, columns < VALUE_SIZE
    in_tile = in_rows[:, None] & in_columns[None, :]
    places = rows[:, None] * VALUE_SIZE + columns[None, :]
    rate = tl.exp(tl.load(a_log_ptr + head))
    bias = tl.load(dt_bias_ptr + head)
    skip = tl.load(skip_ptr + head) if HAS_SKIP else 0.0
    group = head // (NUM_HEADS // NUM_GROUPS)
    begin, end = tl.load(bounds_ptr + run), tl.load(bounds_ptr + run + 1)
    final = segments_ptr + tl.maximum(end - 1, 0) * 4
    num_tokens = tl.load(final + 2) + tl.load(final + 3) - tl.load(segments_ptr + begin * 4 + 2)
    for segment in range(begin, tl.where(num_tokens > MAX_TOKENS, begin, end)):
        part = segments_ptr + segment * 4
        source, target = tl.load(part), tl.load(part + 1)
        first, count = tl.load(part + 2), tl.load(part + 3)
        tile = states_ptr + (tl.maximum(source, 0) * NUM_HEADS + head) * (KEY_SIZE * VALUE_SIZE) + places
        state = tl.where(source >= 0, tl.load(tile, mask=in_tile, other=0.0), 0.0)
        for token in range(first, first + count):
            row = mixed_ptr + token * CHANNELS
            query = tl.load(row + QUERY_AT + group * KEY_SIZE + rows, mask=in_rows, other=0.0)
            key = tl.load(row + KEY_AT + group * KEY_SIZE + rows, mask=in_rows, other=0.0)
            value = tl.load(row + VALUE_AT + head * VALUE_SIZE + columns, mask=in_columns, other=0.0)
            place = token * NUM_HEADS + head
            step_place = token * step_stride.to(tl.int64) + head
            x = tl.load(dt_ptr + step_place) + bias
            step = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(x)))
            state *= tl.exp(-rate * step)
            change = value * step
            if IS_DELTA:
                query /= tl.sqrt((tl.sum(query * query, 0) + 1e-6) * KEY_SIZE)
                key /= tl.sqrt(tl.sum(key * key, 0) + 1e-6)
                factor = 1.0 / (1.0 + tl.exp(-tl.load(beta_ptr + step_place)))
                change = (value - tl.sum(state * key[:, None], 0)) * factor
            state += key[:, None] * change[None, :]
            result = tl.sum(state * query[:, None], 0) + skip * value
            tl.store(out_ptr + place * VALUE_SIZE + columns, result, mask=in_columns)
        tile = states_ptr + (target * NUM_HEADS + head) * (KEY_SIZE * VALUE_SIZE) + places
        tl.store(tile, state, mask=in_tile)


def run_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    segments: StateSegments,
    *,
    has_silu: bool,
) -> Tensor:
    """Implement `kernels.states.RunConv`."""
    check_rows("x", x)
    for name, tensor in {"weight": weight, "bias": bias, "states": states}.items():
        if tensor is not None:
            check_contiguous(name, tensor)
    channels, tables = x.shape[1], segments.find_tables(x.device)
    out = torch.empty(x.shape, device=x.device)
    is_short = int(segments.count.max()) <= SHORT_TOKENS
    run_conv_kernel[(len(segments.run_ends), triton.cdiv(channels, BLOCK_C))](
        *(out, x, weight, bias, states, tables.segments, tables.bounds, x.stride(0)),
        CHANNELS=channels, KEPT=weight.shape[0] - 1, HAS_BIAS=bias is not None, HAS_SILU=has_silu,
        BLOCK_T=SHORT_TOKENS if is_short else LONG_TOKENS, BLOCK_C=BLOCK_C, num_warps=4, **FUSED,
    )  # fmt: skip
    return out


def scan_states(
    mixed: Tensor,
    dt: Tensor,
    beta: Tensor | None,
    weights: ScanWeights,
    states: Tensor,
    segments: StateSegments,
) -> Tensor:
    """As `kernels.torch.states.scan_states`."""
    for name, tensor in {"mixed": mixed, "states": states}.items():
        check_contiguous(name, tensor)
    check_rows("dt", dt)
    if beta is not None and beta.stride() != dt.stride():
        raise ValueError(f"beta must have the strides of dt, {dt.stride()}, not {beta.stride()}")
    sizes = np.diff(segments.run_ends, prepend=0)
    numbers = np.repeat(np.arange(len(sizes)), sizes)
    is_long = np.bincount(numbers, weights=segments.count) > MAX_TOKENS
    if is_long.any():
        long = _select(segments, sizes, is_long, numbers)
        out = torch_states.scan_states(mixed, dt, beta, weights, states, long)
    else:
        out = torch.empty(
            mixed.shape[0], weights.num_heads * weights.value_size, dtype=mixed.dtype, device=mixed.device
        )
    if not is_long.all():
        tables = segments.find_tables(mixed.device)
        grid = (len(sizes), weights.num_heads, triton.cdiv(weights.value_size, BLOCK_V))
        scan_states_kernel[grid](
            *(out, mixed, dt, beta, weights.a_log, weights.dt_bias, weights.skip, states),
            *(tables.segments, tables.bounds, dt.stride(0)),
            NUM_HEADS=weights.num_heads, NUM_GROUPS=weights.num_groups,
            KEY_SIZE=weights.key_size, VALUE_SIZE=weights.value_size,
            QUERY_AT=weights.query_at, KEY_AT=weights.key_at, VALUE_AT=weights.value_at,
            CHANNELS=mixed.shape[1], IS_DELTA=beta is not None, HAS_SKIP=weights.skip is not None,
            MAX_TOKENS=MAX_TOKENS,
            BLOCK_K=next_power_of_2(weights.key_size), BLOCK_V=BLOCK_V, num_warps=4, **FUSED,
        )  # fmt: skip
    return out


def _select(
    segments: StateSegments, sizes: np.ndarray, is_kept: np.ndarray, numbers: np.ndarray
) -> StateSegments:
    """Return the segments of some runs; `numbers` are the runs of the segments, `sizes` their segments."""
    kept = is_kept[numbers]
    return StateSegments(
        segments.source[kept],
        segments.target[kept],
        segments.first[kept],
        segments.count[kept],
        np.cumsum(sizes[is_kept]),
    )
