"""Top-k, top-p and min-p without a sort: pivots close in on the last token that is kept, one program a row.

Scores are at most 0, so the bits of their magnitude are integers in the order of the tokens, best first. A pass
counts the tokens (or their mass in fixed point) up to each of some pivots, and the interval that holds the border
becomes the next one. The first pass is made for both by all tiles in parallel; after it, tiles without a token in the
interval are skipped. Ties at the border go to the lower id.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.draw_tiles import (
    WORST_KEY,
    first_pivot,
    is_finite,
    load_logits,
    load_row_max,
    make_key,
)
from kernels.triton.gumbel import compute_mass, make_noise


@triton.jit
def load_scores(
    logits_ptr: tl.tensor,
    row: tl.tensor,
    row_stride: tl.tensor,
    token_ids: tl.tensor,
    row_max: tl.tensor,
    temperature: tl.tensor,
    VOCAB: tl.constexpr,
) -> tl.tensor:
    logits = load_logits(logits_ptr, row, row_stride, token_ids, VOCAB)
    return tl.div_rn(logits - row_max, temperature + tl.zeros_like(logits))


@triton.jit
def narrow(
    reached: tl.tensor,
    target: tl.tensor,
    before: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    pivots: tl.tensor,
    NUM_PIVOTS: tl.constexpr,
) -> tl.tensor:
    """The interval between two pivots in which the target is reached, what lies before it, and its pivots."""
    place = tl.arange(0, NUM_PIVOTS)
    is_short = reached.to(tl.float64) < target
    index = tl.sum(is_short.to(tl.int32), axis=0)
    before = tl.maximum(before, tl.max(tl.where(place == index - 1, reached, 0), axis=0))
    new_low = tl.max(tl.where(place == index - 1, pivots + 1, low), axis=0)
    high = tl.max(tl.where(place == index, pivots, 0), axis=0)
    low = tl.maximum(low, new_low)
    step = (high - low) // NUM_PIVOTS + 1
    return before, low, high, tl.minimum(low + (place + 1) * step - 1, high)


@triton.jit
def find_border(
    target: tl.tensor,
    sums_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    best_ptr: tl.tensor,
    row: tl.tensor,
    row_stride: tl.tensor,
    row_max: tl.tensor,
    temperature: tl.tensor,
    BY_MASS: tl.constexpr,
    VOCAB: tl.constexpr,
    NUM_TILES: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_PIVOTS: tl.constexpr,
) -> tl.tensor:
    """The smallest key up to which the tokens' number or mass reaches the target, and what lies before it.

    All tokens together must reach it. `sums_ptr` holds what the tiles have up to the first pivots.
    """
    place, tiles = tl.arange(0, NUM_PIVOTS), tl.arange(0, BLOCK_TILES)
    first = tl.load(
        sums_ptr + (row * NUM_TILES + tiles)[:, None] * NUM_PIVOTS + place[None, :],
        mask=(tiles < NUM_TILES)[:, None],
        other=0,
    )
    before, low, high, pivots = narrow(
        tl.sum(first, axis=0), target, tl.zeros([], tl.int64), tl.zeros([], tl.int32),
        tl.zeros([], tl.int32) + WORST_KEY, first_pivot(place, NUM_PIVOTS), NUM_PIVOTS,
    )  # fmt: skip
    while low < high:
        sums = tl.zeros([BLOCK, NUM_PIVOTS], tl.int64)
        for tile in range(NUM_TILES):
            tile_best = tl.load(best_ptr + row * NUM_TILES + tile)
            if make_key(tl.div_rn(tile_best - row_max, temperature)) <= high:
                for start in range(0, TILE, BLOCK):
                    token_ids = tile * TILE + start + tl.arange(0, BLOCK)
                    scores = load_scores(logits_ptr, row, row_stride, token_ids, row_max, temperature, VOCAB)
                    keys = make_key(scores)
                    is_inside = (keys >= low) & (token_ids < VOCAB)
                    if BY_MASS:
                        values = tl.where(is_inside, compute_mass(scores), 0)
                    else:
                        values = is_inside.to(tl.int64)
                    sums += tl.where(keys[:, None] <= pivots[None, :], values[:, None], 0)
        before, low, high, pivots = narrow(
            before + tl.sum(sums, axis=0), target, before, low, high, pivots, NUM_PIVOTS
        )
    return low, before


@triton.jit
def draw_filtered_kernel(
    token_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    best_ptr: tl.tensor,
    count_ptr: tl.tensor,
    mass_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    log_min_p_ptr: tl.tensor,
    row_stride: tl.tensor,
    VOCAB: tl.constexpr,
    NUM_TILES: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_PIVOTS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    row_max = load_row_max(best_ptr, row, NUM_TILES, BLOCK_TILES)
    if (row_max == float("inf")) | (row_max == float("-inf")):
        tl.store(token_ptr + row, tl.full([], -1, tl.int64))
        return
    temperature = tl.load(temperature_ptr + row).to(tl.float32)
    top_k = tl.load(top_k_ptr + row).to(tl.int64)
    top_p = tl.load(top_p_ptr + row).to(tl.float32)
    log_min_p = tl.load(log_min_p_ptr + row).to(tl.float32)
    tiles = tl.arange(0, BLOCK_TILES)
    # The last pivot has everything before it.
    whole = (row * NUM_TILES + tiles) * NUM_PIVOTS + NUM_PIVOTS - 1
    masses = tl.load(mass_ptr + whole, mask=tiles < NUM_TILES, other=0)
    total = tl.sum(masses, axis=0)

    # Kept: keys below the border, and the first `num_ties` tokens on it.
    border, num_ties = tl.zeros([], tl.int32) + WORST_KEY, tl.full([], VOCAB, tl.int64)
    if top_k < VOCAB:
        border, before = find_border(
            top_k.to(tl.float64), count_ptr, logits_ptr, best_ptr, row, row_stride, row_max, temperature,
            False, VOCAB, NUM_TILES, BLOCK_TILES, TILE, BLOCK, NUM_PIVOTS,
        )  # fmt: skip
        num_ties = top_k - before
        total = tl.zeros([], tl.int64)
        for tile in range(NUM_TILES):
            tile_best = tl.load(best_ptr + row * NUM_TILES + tile)
            if make_key(tl.div_rn(tile_best - row_max, temperature)) <= border:
                for start in range(0, TILE, BLOCK):
                    token_ids = tile * TILE + start + tl.arange(0, BLOCK)
                    scores = load_scores(logits_ptr, row, row_stride, token_ids, row_max, temperature, VOCAB)
                    is_before = (make_key(scores) < border) & (token_ids < VOCAB)
                    total += tl.sum(tl.where(is_before, compute_mass(scores), 0), axis=0)
        total += num_ties * compute_mass(-border.to(tl.float32, bitcast=True))
    if top_p <= 1.0:
        limit = top_p.to(tl.float64) * total.to(tl.float64)
        nucleus, before = find_border(
            limit, mass_ptr, logits_ptr, best_ptr, row, row_stride, row_max, temperature,
            True, VOCAB, NUM_TILES, BLOCK_TILES, TILE, BLOCK, NUM_PIVOTS,
        )  # fmt: skip
        # How many tokens of this mass start below the limit; the quotient may be one off.
        mass = compute_mass(-nucleus.to(tl.float32, bitcast=True))
        num_inside = ((limit - before.to(tl.float64)) / tl.maximum(mass, 1).to(tl.float64)).to(tl.int64)
        num_inside += ((before + num_inside * mass).to(tl.float64) < limit).to(tl.int64)
        num_inside -= ((before + (num_inside - 1) * mass).to(tl.float64) >= limit).to(tl.int64)
        num_inside = tl.maximum(num_inside, 1)
        num_ties = tl.where(nucleus == border, tl.minimum(num_ties, num_inside), num_ties)
        num_ties = tl.where(nucleus < border, num_inside, num_ties)
        border = tl.minimum(border, nucleus)

    first_key, second_key = tl.load(keys_ptr + row * 2), tl.load(keys_ptr + row * 2 + 1)
    winner, winner_id = tl.full([], float("-inf"), tl.float32), tl.full([], -1, tl.int64)
    ties_before = tl.zeros([], tl.int64)
    for tile in range(NUM_TILES):
        tile_best = tl.load(best_ptr + row * NUM_TILES + tile)
        if make_key(tl.div_rn(tile_best - row_max, temperature)) <= border:
            for start in range(0, TILE, BLOCK):
                token_ids = tile * TILE + start + tl.arange(0, BLOCK)
                scores = load_scores(logits_ptr, row, row_stride, token_ids, row_max, temperature, VOCAB)
                keys = make_key(scores)
                is_tie = ((keys == border) & (token_ids < VOCAB)).to(tl.int32)
                is_early = ties_before + tl.cumsum(is_tie, axis=0) <= num_ties
                is_kept = (keys < border) | ((keys == border) & is_early)
                is_kept = is_kept & (token_ids < VOCAB) & (scores >= log_min_p)
                noisy = tl.where(
                    is_kept, scores + make_noise(first_key, second_key, token_ids), float("-inf")
                )
                best = tl.max(noisy, axis=0)
                best_id = tl.min(tl.where(noisy == best, token_ids, 0x7FFFFFFF), axis=0).to(tl.int64)
                is_better = best > winner
                winner_id = tl.where(is_better, best_id, winner_id)
                winner = tl.where(is_better, best, winner)
                ties_before += tl.sum(is_tie, axis=0)
    tl.store(token_ptr + row, tl.where(is_finite(winner), winner_id, -1))
