"""Samples on the device as `kernels.torch.sampling` does: same arguments, noise and kept tokens, without a sort."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from kernels.triton.draw_filtered import draw_filtered_kernel
from kernels.triton.draw_tiles import (
    pick_winner_kernel,
    tile_max_kernel,
    tile_noise_kernel,
    tile_sums_kernel,
)
from kernels.triton.launch import EXACT, check_float, check_shape, next_power_of_2

TILE = 2048
# Tokens that a pivot search holds at once, and the number of pivots that it compares them with.
BLOCK = 1024
NUM_PIVOTS = 8


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Statistics of each tile of each row."""

    best: Tensor  # [R, num_tiles] float32
    best_id: Tensor  # [R, num_tiles] int32
    sizes: dict[str, int]

    @property
    def block_tiles(self) -> int:
        return next_power_of_2(self.sizes["NUM_TILES"])

    def make_empty(self) -> _Tiles:
        return _Tiles(torch.empty_like(self.best), torch.empty_like(self.best_id), self.sizes)


def draw_greedy(logits: Tensor) -> Tensor:
    """The most likely token per row, ties to the lowest id; -1 where the maximum is not finite.

    Args:
        logits: [R, V], any float dtype; rows may be further apart than V.

    Returns [R] int64.
    """
    return _pick_winner(_find_tile_max(logits))


def draw_full(logits: Tensor, keys: Tensor, temperature: Tensor, log_min_p: Tensor | None) -> Tensor:
    """Draw from softmax(logits / temperature) over the whole vocabulary; see `kernels.torch.sampling.draw_full`."""
    tiles = _find_tile_max(logits)
    _check_rows(logits, keys, temperature=temperature, log_min_p=log_min_p)
    noisy = tiles.make_empty()
    if len(logits):
        tile_noise_kernel[tuple(tiles.best.shape)](
            noisy.best,
            noisy.best_id,
            tiles.best,
            logits,
            keys,
            temperature,
            temperature if log_min_p is None else log_min_p,
            logits.stride(0),
            **tiles.sizes,
            HAS_MIN_P=log_min_p is not None,
            BLOCK_TILES=tiles.block_tiles,
            num_warps=8,
            **EXACT,
        )
    return _pick_winner(noisy)


def draw_filtered(
    logits: Tensor,
    keys: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    log_min_p: Tensor,
    width: int | None = None,
    *,
    num_pivots: int = NUM_PIVOTS,
) -> Tensor:
    """Draw after top-k, then top-p of what top-k left, then min-p; see `kernels.torch.sampling.draw_filtered`.

    `width` is not used: the search needs no candidates. `num_pivots` is a power of two up to 64; the result does
    not depend on it.
    """
    tiles = _find_tile_max(logits)
    _check_rows(logits, keys, temperature=temperature, top_k=top_k, top_p=top_p, log_min_p=log_min_p)
    token_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if not len(logits):
        return token_ids
    count, mass = torch.empty(
        2, *tiles.best.shape, num_pivots, dtype=torch.int64, device=logits.device
    ).unbind()
    tile_sums_kernel[tuple(tiles.best.shape)](
        count,
        mass,
        tiles.best,
        logits,
        temperature,
        logits.stride(0),
        **tiles.sizes,
        BLOCK_TILES=tiles.block_tiles,
        NUM_PIVOTS=num_pivots,
        num_warps=8,
        **EXACT,
    )
    draw_filtered_kernel[(len(logits),)](
        token_ids,
        logits,
        tiles.best,
        count,
        mass,
        keys,
        temperature,
        top_k,
        top_p,
        log_min_p,
        logits.stride(0),
        **tiles.sizes,
        BLOCK_TILES=tiles.block_tiles,
        BLOCK=min(BLOCK, tiles.sizes["TILE"]),
        NUM_PIVOTS=num_pivots,
        num_warps=8,
        **EXACT,
    )
    return token_ids


def _find_tile_max(logits: Tensor) -> _Tiles:
    check_float("logits", logits)
    if logits.dim() != 2 or logits.stride(1) != 1:
        raise ValueError(f"logits must be [R, V] with contiguous rows, not {tuple(logits.shape)}")
    num_rows, vocab_size = logits.shape
    tile = min(TILE, max(16, next_power_of_2(vocab_size)))
    num_tiles = triton.cdiv(vocab_size, tile)
    best = torch.empty(num_rows, num_tiles, dtype=torch.float32, device=logits.device)
    best_id = torch.empty(num_rows, num_tiles, dtype=torch.int32, device=logits.device)
    sizes = {"VOCAB": vocab_size, "NUM_TILES": num_tiles, "TILE": tile}
    if num_rows:
        tile_max_kernel[(num_rows, num_tiles)](
            best, best_id, logits, logits.stride(0), **sizes, num_warps=4, **EXACT
        )
    return _Tiles(best, best_id, sizes)


def _pick_winner(tiles: _Tiles) -> Tensor:
    token_ids = torch.empty(len(tiles.best), dtype=torch.int64, device=tiles.best.device)
    if len(token_ids):
        pick_winner_kernel[(len(token_ids),)](
            token_ids,
            tiles.best,
            tiles.best_id,
            NUM_TILES=tiles.sizes["NUM_TILES"],
            BLOCK_TILES=tiles.block_tiles,
            num_warps=1,
            **EXACT,
        )
    return token_ids


def _check_rows(logits: Tensor, keys: Tensor, **rows: Tensor | None) -> None:
    num_rows = len(logits)
    check_shape("keys", keys, (num_rows, 2))
    for name, tensor in rows.items():
        if tensor is not None:
            check_shape(name, tensor, (num_rows,))
