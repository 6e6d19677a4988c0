"""Layers with states: convolutions, and recurrences token after token in short runs, in chunks in long ones.

A program of a short run has 32 columns of a head's state, and walks through the segments of a run, so a token has the
same bits in any batch. Segments are read from the device alone, so a recorded launch serves other runs; a run that pads
has no segments. In runs of more than `MAX_TOKENS` tokens, one launch computes for each chunk, all at once, how its
tokens act on each other; a second one walks through the chunks with products of tiles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.states import CHUNK, MAX_TOKENS, ScanWeights, StateSegments
from kernels.triton.launch import FUSED, check_contiguous, check_rows, next_power_of_2

BLOCK_V = 32  # columns of a program
BLOCK_K = 32  # rows of a state, in a product
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


@triton.jit
def load_keys(
    mixed_ptr: tl.tensor,
    tokens: tl.tensor,
    is_token: tl.tensor,
    at: tl.tensor,
    start: tl.tensor,
    CHANNELS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """Return some columns [tokens, BLOCK_K] of the queries or keys of a group."""
    columns = start + tl.arange(0, BLOCK_K)
    mask = is_token[:, None] & (columns < KEY_SIZE)[None, :]
    return tl.load(mixed_ptr + tokens[:, None] * CHANNELS + at + columns[None, :], mask=mask, other=0.0)


@triton.jit
def load_steps(dt_ptr: tl.tensor, place: tl.tensor, is_token: tl.tensor, bias: tl.tensor) -> tl.tensor:
    """Return the step sizes of tokens; 0 where there is none."""
    x = tl.load(dt_ptr + place, mask=is_token, other=0.0) + bias
    return tl.where(is_token, tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(x))), 0.0)


@triton.jit
def relate_chunk_kernel(
    scores_ptr: tl.tensor,
    solved_ptr: tl.tensor,
    mixed_ptr: tl.tensor,
    dt_ptr: tl.tensor,
    beta_ptr: tl.tensor,
    a_log_ptr: tl.tensor,
    dt_bias_ptr: tl.tensor,
    chunks_ptr: tl.tensor,
    step_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    QUERY_AT: tl.constexpr,
    KEY_AT: tl.constexpr,
    CHANNELS: tl.constexpr,
    IS_DELTA: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Write how much of each token's change the later ones read, and in a delta net how changes follow from values.

    A row of each [CHUNK, CHUNK] matrix lies at its token and head. The second is the inverse of a triangular matrix.
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    first, stop = tl.load(chunks_ptr + chunk * 2), tl.load(chunks_ptr + chunk * 2 + 1)
    place = tl.arange(0, CHUNK)
    tokens = first + place
    is_token = tokens < stop
    group = head // (NUM_HEADS // NUM_GROUPS) * KEY_SIZE
    products = tl.zeros([CHUNK, CHUNK], tl.float32)
    overlaps = tl.zeros([CHUNK, CHUNK], tl.float32)
    squares = tl.zeros([CHUNK], tl.float32)
    query_squares = tl.zeros([CHUNK], tl.float32)
    for at in range(0, KEY_SIZE, BLOCK_K):
        query = load_keys(mixed_ptr, tokens, is_token, QUERY_AT + group, at, CHANNELS, KEY_SIZE, BLOCK_K)
        key = load_keys(mixed_ptr, tokens, is_token, KEY_AT + group, at, CHANNELS, KEY_SIZE, BLOCK_K)
        products += tl.dot(query, tl.trans(key), input_precision="tf32x3")
        if IS_DELTA:
            overlaps += tl.dot(key, tl.trans(key), input_precision="tf32x3")
            squares += tl.sum(key * key, 1)
            query_squares += tl.sum(query * query, 1)
    step_place = tokens * step_stride.to(tl.int64) + head
    step = load_steps(dt_ptr, step_place, is_token, tl.load(dt_bias_ptr + head))
    total = tl.cumsum(-tl.exp(tl.load(a_log_ptr + head)) * step, 0)
    # Decay from a token to a later one, whose row it is.
    is_later = place[:, None] >= place[None, :]
    between = tl.where(is_later, tl.exp(tl.where(is_later, total[:, None] - total[None, :], 0.0)), 0.0)
    scores = products * between
    key_scale = 1.0 / tl.sqrt(squares + 1e-6)
    if IS_DELTA:
        scores *= key_scale[None, :] / tl.sqrt((query_squares + 1e-6) * KEY_SIZE)[:, None]
    target = (tokens[:, None] * NUM_HEADS + head) * CHUNK + place[None, :]
    tl.store(scores_ptr + target, scores, mask=is_token[:, None])
    if IS_DELTA:
        factor = 1.0 / (1.0 + tl.exp(-tl.load(beta_ptr + step_place, mask=is_token, other=0.0)))
        lower = overlaps * between * (key_scale * factor)[:, None] * key_scale[None, :]
        lower = tl.where(place[:, None] > place[None, :], lower, 0.0)
        solved = tl.where(place[:, None] == place[None, :], 1.0, 0.0)
        for row in range(1, CHUNK):
            is_row = (place == row)[:, None]
            coefficients = tl.sum(tl.where(is_row, lower, 0.0), 0)
            solved -= tl.where(is_row, tl.sum(coefficients[:, None] * solved, 0)[None, :], 0.0)
        tl.store(solved_ptr + target, solved * factor[None, :], mask=is_token[:, None])


@triton.jit
def scan_chunks_kernel(
    out_ptr: tl.tensor,
    mixed_ptr: tl.tensor,
    dt_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    solved_ptr: tl.tensor,
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
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """Walk through the chunks of one long run; a segment is as for `scan_states_kernel`."""
    run, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(bounds_ptr + run), tl.load(bounds_ptr + run + 1)
    final = segments_ptr + tl.maximum(end - 1, 0) * 4
    num_tokens = tl.load(final + 2) + tl.load(final + 3) - tl.load(segments_ptr + begin * 4 + 2)
    rows, place = tl.arange(0, BLOCK_K), tl.arange(0, CHUNK)
    columns = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_columns = columns < VALUE_SIZE
    rate, bias = tl.exp(tl.load(a_log_ptr + head)), tl.load(dt_bias_ptr + head)
    group = head // (NUM_HEADS // NUM_GROUPS) * KEY_SIZE
    for segment in range(begin, tl.where(num_tokens > MAX_TOKENS, end, begin)):
        part = segments_ptr + segment * 4
        source, target = tl.load(part), tl.load(part + 1)
        first, stop = tl.load(part + 2), tl.load(part + 2) + tl.load(part + 3)
        # The state stays in memory: with products of this precision the registers do not hold it. A segment without
        # tokens copies it.
        for start in range(first, tl.maximum(stop, first + 1), CHUNK):
            slot = tl.where(start == first, source, target)
            old = states_ptr + (tl.maximum(slot, 0) * NUM_HEADS + head) * (KEY_SIZE * VALUE_SIZE) + columns[None, :]
            new = states_ptr + (target * NUM_HEADS + head) * (KEY_SIZE * VALUE_SIZE) + columns[None, :]
            last_row = tl.where(slot >= 0, KEY_SIZE, 0)
            tokens = start + place
            is_token = tokens < stop
            seen = tl.zeros([CHUNK, BLOCK_V], tl.float32)
            known = tl.zeros([CHUNK, BLOCK_V], tl.float32)
            squares = tl.zeros([CHUNK], tl.float32)
            query_squares = tl.zeros([CHUNK], tl.float32)
            for at in range(0, KEY_SIZE, BLOCK_K):
                in_state = (at + rows < last_row)[:, None] & in_columns[None, :]
                state = tl.load(old + (at + rows)[:, None] * VALUE_SIZE, mask=in_state, other=0.0)
                query = load_keys(mixed_ptr, tokens, is_token, QUERY_AT + group, at, CHANNELS, KEY_SIZE, BLOCK_K)
                seen += tl.dot(query, state, input_precision="tf32x3")
                if IS_DELTA:
                    key = load_keys(mixed_ptr, tokens, is_token, KEY_AT + group, at, CHANNELS, KEY_SIZE, BLOCK_K)
                    known += tl.dot(key, state, input_precision="tf32x3")
                    squares += tl.sum(key * key, 1)
                    query_squares += tl.sum(query * query, 1)
            mask = is_token[:, None] & in_columns[None, :]
            value_row = mixed_ptr + tokens[:, None] * CHANNELS + VALUE_AT + head * VALUE_SIZE
            value = tl.load(value_row + columns[None, :], mask=mask, other=0.0)
            step = load_steps(dt_ptr, tokens * step_stride.to(tl.int64) + head, is_token, bias)
            total, whole = tl.cumsum(-rate * step, 0), tl.sum(-rate * step, 0)
            before, after = tl.exp(total), tl.exp(whole - total)
            matrix = (tokens[:, None] * NUM_HEADS + head) * CHUNK + place[None, :]
            if IS_DELTA:
                key_scale = 1.0 / tl.sqrt(squares + 1e-6)
                seen /= tl.sqrt((query_squares + 1e-6) * KEY_SIZE)[:, None]
                solved = tl.load(solved_ptr + matrix, mask=is_token[:, None], other=0.0)
                rest = value - (before * key_scale)[:, None] * known
                change = tl.dot(solved, rest, input_precision="tf32x3")
                after *= key_scale
            else:
                change = value * step[:, None]
            scores = tl.load(scores_ptr + matrix, mask=is_token[:, None], other=0.0)
            result = before[:, None] * seen + tl.dot(scores, change, input_precision="tf32x3")
            if HAS_SKIP:
                result += tl.load(skip_ptr + head) * value
            out_row = out_ptr + (tokens[:, None] * NUM_HEADS + head) * VALUE_SIZE
            tl.store(out_row + columns[None, :], result, mask=mask)
            tl.debug_barrier()  # all threads have read the state
            for at in range(0, KEY_SIZE, BLOCK_K):
                in_tile = (at + rows < KEY_SIZE)[:, None] & in_columns[None, :]
                in_state = in_tile & (at + rows < last_row)[:, None]
                state = tl.load(old + (at + rows)[:, None] * VALUE_SIZE, mask=in_state, other=0.0) * tl.exp(whole)
                key = load_keys(mixed_ptr, tokens, is_token, KEY_AT + group, at, CHANNELS, KEY_SIZE, BLOCK_K)
                state += tl.dot(tl.trans(key * after[:, None]), change, input_precision="tf32x3")
                tl.store(new + (at + rows)[:, None] * VALUE_SIZE, state, mask=in_tile)
            tl.debug_barrier()  # the next chunk reads it


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
    (num_tokens, channels), tables = mixed.shape, segments.find_tables(mixed.device)
    num_runs, num_heads = len(segments.run_ends), weights.num_heads
    out = torch.empty(num_tokens, num_heads * weights.value_size, dtype=mixed.dtype, device=mixed.device)
    block_k = next_power_of_2(weights.key_size)
    shape = {
        "NUM_HEADS": num_heads, "NUM_GROUPS": weights.num_groups, "KEY_SIZE": weights.key_size,
        "QUERY_AT": weights.query_at, "KEY_AT": weights.key_at, "CHANNELS": channels, "IS_DELTA": beta is not None,
    }  # fmt: skip
    values = {
        "VALUE_SIZE": weights.value_size, "VALUE_AT": weights.value_at, "HAS_SKIP": weights.skip is not None,
        "MAX_TOKENS": MAX_TOKENS, "BLOCK_V": BLOCK_V,
    }  # fmt: skip
    grid = (num_runs, num_heads, triton.cdiv(weights.value_size, BLOCK_V))
    runs = (weights.skip, states, tables.segments, tables.bounds, dt.stride(0))
    num_long = 0 if tables.chunks is None else len(tables.chunks)
    if num_long:
        scores = torch.empty(num_tokens, num_heads, CHUNK, device=mixed.device)
        solved = scores if beta is None else torch.empty_like(scores)
        blocks = {"CHUNK": CHUNK, "BLOCK_K": BLOCK_K, "num_warps": 4}
        relate_chunk_kernel[(num_long, num_heads)](
            *(scores, solved, mixed, dt, beta, weights.a_log, weights.dt_bias, tables.chunks, dt.stride(0)),
            **shape, **blocks, num_stages=1, **FUSED,
        )  # fmt: skip
        scan_chunks_kernel[grid](
            *(out, mixed, dt, scores, solved, weights.a_log, weights.dt_bias, *runs),
            **shape, **values, **blocks, num_stages=1, **FUSED,
        )  # fmt: skip
    if tables.has_short:
        scan_states_kernel[grid](
            *(out, mixed, dt, beta, weights.a_log, weights.dt_bias, *runs),
            **shape, **values, BLOCK_K=block_k, num_warps=4, **FUSED,
        )  # fmt: skip
    return out
