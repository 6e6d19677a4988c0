"""Gated linear recurrences token after token: decodes, and the few tokens of a run with drafts.

A program owns some columns of one head's state and walks through the segments of one run, so a token has the same bits
in any batch. Longer runs, those of prompts, go to torch, which computes them in chunks.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

import kernels.torch.states as torch_states
from kernels.states import ScanWeights, StateSegments
from kernels.triton.launch import FUSED, check_contiguous, next_power_of_2

MAX_TOKENS = 32  # of a run that is not computed in chunks
BLOCK_V = 32  # columns of a program


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
    for segment in range(tl.load(bounds_ptr + run), tl.load(bounds_ptr + run + 1)):
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
            x = tl.load(dt_ptr + place) + bias
            step = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(x)))
            state *= tl.exp(-rate * step)
            change = value * step
            if IS_DELTA:
                query /= tl.sqrt((tl.sum(query * query, 0) + 1e-6) * KEY_SIZE)
                key /= tl.sqrt(tl.sum(key * key, 0) + 1e-6)
                factor = 1.0 / (1.0 + tl.exp(-tl.load(beta_ptr + place)))
                change = (value - tl.sum(state * key[:, None], 0)) * factor
            state += key[:, None] * change[None, :]
            result = tl.sum(state * query[:, None], 0) + skip * value
            tl.store(out_ptr + place * VALUE_SIZE + columns, result, mask=in_columns)
        tile = states_ptr + (target * NUM_HEADS + head) * (KEY_SIZE * VALUE_SIZE) + places
        tl.store(tile, state, mask=in_tile)


def scan_states(
    mixed: Tensor,
    dt: Tensor,
    beta: Tensor | None,
    weights: ScanWeights,
    states: Tensor,
    segments: StateSegments,
) -> Tensor:
    """As `kernels.torch.states.scan_states`."""
    for name, tensor in {"mixed": mixed, "dt": dt, "beta": beta, "states": states}.items():
        if tensor is not None:
            check_contiguous(name, tensor)
    long, short = _split(segments)
    if len(long.run_ends):
        out = torch_states.scan_states(mixed, dt, beta, weights, states, long)
    else:
        out = torch.empty(
            mixed.shape[0], weights.num_heads * weights.value_size, dtype=mixed.dtype, device=mixed.device
        )
    num_runs = len(short.run_ends)
    if num_runs:
        table = np.stack((short.source, short.target, short.first, short.count), axis=1)
        bounds = np.concatenate(([0], short.run_ends))
        grid = (num_runs, weights.num_heads, triton.cdiv(weights.value_size, BLOCK_V))
        scan_states_kernel[grid](
            *(out, mixed, dt, beta, weights.a_log, weights.dt_bias, weights.skip, states),
            *(torch.from_numpy(each).to(mixed.device, non_blocking=True) for each in (table, bounds)),
            NUM_HEADS=weights.num_heads, NUM_GROUPS=weights.num_groups,
            KEY_SIZE=weights.key_size, VALUE_SIZE=weights.value_size,
            QUERY_AT=weights.query_at, KEY_AT=weights.key_at, VALUE_AT=weights.value_at,
            CHANNELS=mixed.shape[1], IS_DELTA=beta is not None, HAS_SKIP=weights.skip is not None,
            BLOCK_K=next_power_of_2(weights.key_size), BLOCK_V=BLOCK_V, num_warps=4, **FUSED,
        )  # fmt: skip
    return out


def _split(segments: StateSegments) -> tuple[StateSegments, StateSegments]:
    """Return the segments of the runs for torch, and of those for the kernel."""
    sizes = np.diff(segments.run_ends, prepend=0)
    numbers = np.repeat(np.arange(len(sizes)), sizes)
    is_long = np.bincount(numbers, weights=segments.count) > MAX_TOKENS
    if not is_long.any():
        return _select(segments, sizes, is_long, numbers), segments
    return _select(segments, sizes, is_long, numbers), _select(segments, sizes, ~is_long, numbers)


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
