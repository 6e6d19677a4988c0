"""Draws over the whole vocabulary, tile by tile in parallel: row maxima, noisy maxima, and the winner of a row."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.gumbel import compute_mass, make_noise

WORST_KEY = tl.constexpr(0x7F800000)  # of -inf


@triton.jit
def load_logits(
    logits_ptr: tl.tensor, row: tl.tensor, row_stride: tl.tensor, token_ids: tl.tensor, VOCAB: tl.constexpr
) -> tl.tensor:
    """Logits of one row as float32, NaN as +inf: both make the row's maximum infinite, which is an error."""
    mask = token_ids < VOCAB
    logits = tl.load(logits_ptr + row * row_stride + token_ids, mask=mask, other=float("-inf"))
    wide = logits.to(tl.float32)
    return tl.where(wide != wide, float("inf"), wide)


@triton.jit
def load_row_max(
    best_ptr: tl.tensor, row: tl.tensor, NUM_TILES: tl.constexpr, BLOCK_TILES: tl.constexpr
) -> tl.tensor:
    tiles = tl.arange(0, BLOCK_TILES)
    best = tl.load(best_ptr + row * NUM_TILES + tiles, mask=tiles < NUM_TILES, other=float("-inf"))
    return tl.max(best, axis=0)


@triton.jit
def make_key(score: tl.tensor) -> tl.tensor:
    """An integer in the order of the scores, which are at most 0: the best is the smallest."""
    return score.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def first_pivot(index: tl.tensor, NUM_PIVOTS: tl.constexpr) -> tl.tensor:
    """Where a search looks first: keys of the scores -1/64, -1/16 and so on to -64, and then the worst."""
    return tl.where(index < NUM_PIVOTS - 1, (121 + 2 * index) << 23, WORST_KEY)


@triton.jit
def is_finite(value: tl.tensor) -> tl.tensor:
    return (value > float("-inf")) & (value < float("inf"))


@triton.jit
def store_best(
    best_ptr: tl.tensor, best_id_ptr: tl.tensor, place: tl.tensor, values: tl.tensor, token_ids: tl.tensor
) -> None:
    """Keep the largest value of a tile and the lowest id that has it."""
    best = tl.max(values, axis=0)
    tl.store(best_ptr + place, best)
    tl.store(best_id_ptr + place, tl.min(tl.where(values == best, token_ids, 0x7FFFFFFF), axis=0))


@triton.jit
def tile_max_kernel(
    best_ptr: tl.tensor,
    best_id_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    row_stride: tl.tensor,
    VOCAB: tl.constexpr,
    NUM_TILES: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token_ids = tile * TILE + tl.arange(0, TILE)
    logits = load_logits(logits_ptr, row, row_stride, token_ids, VOCAB)
    store_best(best_ptr, best_id_ptr, row * NUM_TILES + tile, logits, token_ids)


@triton.jit
def tile_noise_kernel(
    noisy_ptr: tl.tensor,
    noisy_id_ptr: tl.tensor,
    best_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    log_min_p_ptr: tl.tensor,
    row_stride: tl.tensor,
    VOCAB: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    NUM_TILES: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token_ids = tile * TILE + tl.arange(0, TILE)
    row_max = load_row_max(best_ptr, row, NUM_TILES, BLOCK_TILES)
    logits = load_logits(logits_ptr, row, row_stride, token_ids, VOCAB)
    shift = tl.where(is_finite(row_max), row_max, 0.0)
    scores = tl.div_rn(logits - shift, tl.load(temperature_ptr + row).to(tl.float32) + tl.zeros_like(logits))
    if HAS_MIN_P:
        scores = tl.where(scores < tl.load(log_min_p_ptr + row).to(tl.float32), float("-inf"), scores)
    noise = make_noise(tl.load(keys_ptr + row * 2), tl.load(keys_ptr + row * 2 + 1), token_ids)
    noisy = tl.where(is_finite(row_max), scores + noise, float("-inf"))
    store_best(noisy_ptr, noisy_id_ptr, row * NUM_TILES + tile, noisy, token_ids)


@triton.jit
def tile_sums_kernel(
    count_ptr: tl.tensor,
    mass_ptr: tl.tensor,
    best_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    row_stride: tl.tensor,
    VOCAB: tl.constexpr,
    NUM_TILES: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    TILE: tl.constexpr,
    NUM_PIVOTS: tl.constexpr,
) -> None:
    """The first pass of every search: a tile's tokens, and their mass, up to each of the first pivots."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token_ids = tile * TILE + tl.arange(0, TILE)
    row_max = load_row_max(best_ptr, row, NUM_TILES, BLOCK_TILES)
    logits = load_logits(logits_ptr, row, row_stride, token_ids, VOCAB)
    shift = tl.where(is_finite(row_max), row_max, 0.0)
    scores = tl.div_rn(logits - shift, tl.load(temperature_ptr + row).to(tl.float32) + tl.zeros_like(logits))
    mass = tl.where(is_finite(row_max), compute_mass(tl.minimum(scores, 0.0)), 0)
    keys = make_key(scores)
    place = (row * NUM_TILES + tile) * NUM_PIVOTS
    for index in tl.static_range(NUM_PIVOTS):
        is_inside = (keys <= first_pivot(index, NUM_PIVOTS)) & (token_ids < VOCAB)
        tl.store(count_ptr + place + index, tl.sum(is_inside.to(tl.int64), axis=0))
        tl.store(mass_ptr + place + index, tl.sum(tl.where(is_inside, mass, 0), axis=0))


@triton.jit
def pick_winner_kernel(
    token_ptr: tl.tensor,
    best_ptr: tl.tensor,
    best_id_ptr: tl.tensor,
    NUM_TILES: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, BLOCK_TILES)
    mask = tiles < NUM_TILES
    best = tl.load(best_ptr + row * NUM_TILES + tiles, mask=mask, other=float("-inf"))
    best_id = tl.load(best_id_ptr + row * NUM_TILES + tiles, mask=mask, other=0x7FFFFFFF)
    row_max = tl.max(best, axis=0)
    winner = tl.min(tl.where(best == row_max, best_id, 0x7FFFFFFF), axis=0)
    tl.store(token_ptr + row, tl.where(is_finite(row_max), winner, -1).to(tl.int64))
