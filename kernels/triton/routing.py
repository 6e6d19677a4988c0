"""The routes of a mixture in two launches: the experts of each token, then the rows sorted by expert."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops import Routing
from kernels.torch.routing import TINY
from kernels.triton.launch import FUSED, check_contiguous, check_shape, next_power_of_2

BLOCK_PAIRS = 1024  # that a program sorts at once


@triton.jit
def choose_experts_kernel(
    ids_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    factor: tl.tensor,
    tiny: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SCORE: tl.constexpr,
    IS_NORMALIZED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    expert, slots = tl.arange(0, BLOCK), tl.arange(0, BLOCK_K)
    is_expert = expert < NUM_EXPERTS
    scores = tl.load(logits_ptr + token * NUM_EXPERTS + expert, mask=is_expert, other=float("-inf"))
    if SCORE == "softmax":
        scores = tl.exp(scores - tl.max(scores, 0))
        scores /= tl.sum(scores, 0)
    if SCORE == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-scores))
    ranked = scores
    if HAS_BIAS:
        ranked += tl.load(bias_ptr + expert, mask=is_expert, other=0.0)
    # NaN ranks first, as in torch, so that no id leaves the range.
    ranked = tl.where(is_expert, tl.where(ranked != ranked, float("inf"), ranked), float("-inf"))
    if NUM_GROUPS > 1:
        group, groups = expert // (NUM_EXPERTS // NUM_GROUPS), tl.arange(0, BLOCK_GROUPS)
        totals = tl.full([BLOCK_GROUPS], float("-inf"), tl.float32)
        for each in range(NUM_GROUPS):
            rest = tl.where(group == each, ranked, float("-inf"))
            total = 0.0
            for _ in range(GROUP_BEST):
                best, place = tl.max(rest, 0, return_indices=True)
                total += best
                rest = tl.where(expert == place, float("-inf"), rest)
            totals = tl.where(groups == each, total, totals)
        is_kept = expert < 0
        for _ in range(NUM_CHOSEN):
            place = tl.argmax(totals, 0)
            is_kept = is_kept | (group == place)
            totals = tl.where(groups == place, float("-inf"), totals)
        ranked = tl.where(is_kept, ranked, float("-inf"))
    ids = tl.zeros([BLOCK_K], tl.int64)
    weights = tl.full([BLOCK_K], float("-inf"), tl.float32)
    for slot in range(TOP_K):
        place = tl.argmax(ranked, 0)
        ids = tl.where(slots == slot, place, ids)
        weights = tl.where(slots == slot, tl.sum(tl.where(expert == place, scores, 0.0), 0), weights)
        ranked = tl.where(expert == place, float("-inf"), ranked)
    is_slot = slots < TOP_K
    if SCORE == "topk_softmax":
        weights = tl.exp(weights - tl.max(weights, 0))
        weights /= tl.sum(weights, 0)
    if IS_NORMALIZED:
        weights /= tl.sum(tl.where(is_slot, weights, 0.0), 0) + tiny
    tl.store(ids_ptr + token * TOP_K + slots, ids, mask=is_slot)
    tl.store(weights_ptr + token * TOP_K + slots, weights * factor, mask=is_slot)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def group_pairs_kernel(
    pairs_ptr: tl.tensor,
    tile_experts_ptr: tl.tensor,
    tile_starts_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    num_pairs: int,
    num_tiles: int,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write the pairs and tiles of one expert; every program counts the pairs of all."""
    expert = tl.program_id(0)
    experts, lanes = tl.arange(0, BLOCK_EXPERTS), tl.arange(0, BLOCK)
    counts = tl.zeros([BLOCK_EXPERTS], tl.int32)
    for start in range(0, num_pairs, BLOCK):
        is_pair = start + lanes < num_pairs
        ids = tl.load(ids_ptr + start + lanes, mask=is_pair, other=-1).to(tl.int32)
        counts += tl.histogram(ids, BLOCK_EXPERTS, mask=ids >= 0)
    tiles = (counts + BLOCK_ROWS - 1) // BLOCK_ROWS
    is_before, is_own = experts < expert, experts == expert
    first, first_tile = tl.sum(tl.where(is_before, counts, 0), 0), tl.sum(tl.where(is_before, tiles, 0), 0)
    own_tiles = tl.sum(tl.where(is_own, tiles, 0), 0)
    tl.store(ends_ptr + expert, first + tl.sum(tl.where(is_own, counts, 0), 0))
    for start in range(0, own_tiles, BLOCK):
        is_tile = start + lanes < own_tiles
        tile = first_tile + start + lanes
        tl.store(tile_experts_ptr + tile, expert, mask=is_tile)
        tl.store(tile_starts_ptr + tile, first + (start + lanes) * BLOCK_ROWS, mask=is_tile)
    for start in range(tl.sum(tiles, 0) + expert * BLOCK, num_tiles, NUM_EXPERTS * BLOCK):
        tl.store(tile_experts_ptr + start + lanes, -1, mask=start + lanes < num_tiles)
    for start in range(0, num_pairs, BLOCK):
        is_pair = start + lanes < num_pairs
        is_here = tl.load(ids_ptr + start + lanes, mask=is_pair, other=-1) == expert
        place = first + tl.cumsum(is_here.to(tl.int32), 0) - 1
        tl.store(pairs_ptr + place, (start + lanes).to(tl.int64), mask=is_here)
        first += tl.sum(is_here.to(tl.int32), 0)


@dataclass(frozen=True, slots=True)
class Grouping:
    """The pairs (token, slot) of a step that have an expert, sorted by it; pair = token * K + slot."""

    pairs: Tensor  # [T * K] int64; undefined after the last pair with an expert
    tile_experts: Tensor  # [tiles] int32, -1: no rows
    tile_starts: Tensor  # [tiles] int32, the first place of each tile's rows
    segment_ends: Tensor  # [E] int32, the place after each expert's rows


def choose_experts(
    logits: Tensor, routing: Routing, correction_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Implement `kernels.ops.ChooseExperts`; of equal scores, the lower id comes first."""
    check_contiguous("logits", logits)
    num_tokens, num_experts = logits.shape
    if correction_bias is not None:
        check_shape("correction_bias", correction_bias, (num_experts,))
    shape = (num_tokens, routing.top_k)
    ids = torch.empty(shape, dtype=torch.int64, device=logits.device)
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    has_bias = correction_bias is not None and routing.score != "topk_softmax"
    if num_tokens:
        choose_experts_kernel[(num_tokens,)](
            *(ids, weights, logits, correction_bias if has_bias else logits, routing.scale, TINY),
            NUM_EXPERTS=num_experts,
            TOP_K=routing.top_k,
            SCORE=routing.score,
            IS_NORMALIZED=routing.is_normalized and routing.score != "topk_softmax",
            HAS_BIAS=has_bias,
            NUM_GROUPS=1 if routing.score == "topk_softmax" else routing.num_groups,
            NUM_CHOSEN=routing.num_chosen_groups,
            GROUP_BEST=routing.group_best,
            BLOCK=next_power_of_2(num_experts),
            BLOCK_GROUPS=next_power_of_2(routing.num_groups),
            BLOCK_K=next_power_of_2(routing.top_k),
            num_warps=1,
            **FUSED,
        )
    return ids, weights


def group_pairs(ids: Tensor, num_experts: int, block_rows: int) -> Grouping:
    """Sort the pairs of [T, K] ids by expert and cut each expert's rows into tiles, on the device."""
    check_contiguous("ids", ids)
    num_pairs = ids.numel()
    # At most one tile of each expert is not full.
    num_tiles = min(num_pairs, num_pairs // block_rows + num_experts)
    pairs = torch.empty(num_pairs, dtype=torch.int64, device=ids.device)
    tile_experts, tile_starts, ends = (
        torch.empty(size, dtype=torch.int32, device=ids.device) for size in (num_tiles, num_tiles, num_experts)
    )
    group_pairs_kernel[(num_experts,)](
        *(pairs, tile_experts, tile_starts, ends, ids, num_pairs, num_tiles),
        NUM_EXPERTS=num_experts,
        BLOCK_EXPERTS=max(16, next_power_of_2(num_experts)),
        BLOCK_ROWS=block_rows,
        BLOCK=BLOCK_PAIRS,
        num_warps=4,
        **FUSED,
    )
    return Grouping(pairs, tile_experts, tile_starts, ends)
