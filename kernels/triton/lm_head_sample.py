"""The last product and the draw in one pass over the weights, for small batches.

No logits are written: a tile of the vocabulary keeps its best noisy score of each row. Rows that filter by top-k or
top-p, have a mask or want logprobs need the logits and take the other path.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops import MAX_HEAD_ROWS
from kernels.triton.draw_tiles import pick_winner_kernel
from kernels.triton.gumbel import make_noise
from kernels.triton.launch import EXACT, FUSED, check_contiguous, check_float, check_shape, next_power_of_2

BLOCK_ROWS, BLOCK_VOCAB, BLOCK_WIDTH = 16, 128, 128


@triton.jit(do_not_specialize=["num_rows"])
def lm_head_sample_kernel(
    best_ptr: tl.tensor,
    best_id_ptr: tl.tensor,
    hidden_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    num_rows: tl.tensor,
    VOCAB: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_TILES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_VOCAB: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
) -> None:
    # Programs start in the order of the first axis: all rows of a tile run together and read its weights once.
    tile = tl.program_id(1)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    token = tile * BLOCK_VOCAB + tl.arange(0, BLOCK_VOCAB)
    is_row, is_token = row < num_rows, token < VOCAB
    row_offsets = row.to(tl.int64)[:, None] * WIDTH
    token_offsets = token.to(tl.int64)[:, None] * WIDTH
    products = tl.zeros([BLOCK_ROWS, BLOCK_VOCAB], dtype=tl.float32)
    for start in range(0, WIDTH, BLOCK_WIDTH):
        column = start + tl.arange(0, BLOCK_WIDTH)
        is_column = (column < WIDTH)[None, :]
        hidden = tl.load(
            hidden_ptr + row_offsets + column[None, :], mask=is_row[:, None] & is_column, other=0.0
        )
        weight = tl.load(
            weight_ptr + token_offsets + column[None, :], mask=is_token[:, None] & is_column, other=0.0
        )
        products += tl.dot(hidden, tl.trans(weight), input_precision="ieee")
    # Rounded as logits are where they are written.
    logits = products.to(hidden_ptr.dtype.element_ty).to(tl.float32)
    temperature = tl.load(temperature_ptr + row, mask=is_row, other=1.0).to(tl.float32)[:, None]
    is_greedy = temperature <= 0.0
    scores = tl.div_rn(logits, tl.where(is_greedy, 1.0, temperature) + tl.zeros_like(logits))
    first_key = tl.load(keys_ptr + row * 2, mask=is_row, other=0)[:, None]
    second_key = tl.load(keys_ptr + row * 2 + 1, mask=is_row, other=0)[:, None]
    noise = make_noise(first_key, second_key, token[None, :] + tl.zeros([BLOCK_ROWS, BLOCK_VOCAB], tl.int32))
    scores = tl.where(is_greedy, scores, scores + noise)
    # NaN becomes an infinity, which makes the row fail.
    scores = tl.where(scores != scores, float("inf"), scores)
    scores = tl.where(is_row[:, None] & is_token[None, :], scores, float("-inf"))
    best = tl.max(scores, axis=1)
    best_id = tl.min(tl.where(scores == best[:, None], token[None, :], 0x7FFFFFFF), axis=1)
    place = row.to(tl.int64) * NUM_TILES + tile
    tl.store(best_ptr + place, best, mask=is_row)
    tl.store(best_id_ptr + place, best_id, mask=is_row)


def lm_head_sample(hidden: Tensor, weight: Tensor, keys: Tensor, temperature: Tensor) -> Tensor:
    """Draw one token per row; see `kernels.ops.LmHeadSample`.

    The tokens are those of the path over logits, except where two noisy scores are closer than their rounding.
    Source: FlashSampling, 2026.
    """
    _check(hidden, weight, keys, temperature)
    num_rows, width = hidden.shape
    vocab_size = weight.shape[0]
    num_tiles = triton.cdiv(vocab_size, BLOCK_VOCAB)
    best = torch.empty(num_rows, num_tiles, dtype=torch.float32, device=hidden.device)
    best_id = torch.empty(num_rows, num_tiles, dtype=torch.int32, device=hidden.device)
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=hidden.device)
    if not num_rows:
        return token_ids
    lm_head_sample_kernel[(triton.cdiv(num_rows, BLOCK_ROWS), num_tiles)](
        best,
        best_id,
        hidden,
        weight,
        keys,
        temperature,
        num_rows,
        VOCAB=vocab_size,
        WIDTH=width,
        NUM_TILES=num_tiles,
        BLOCK_ROWS=BLOCK_ROWS,
        BLOCK_VOCAB=BLOCK_VOCAB,
        BLOCK_WIDTH=BLOCK_WIDTH if hidden.element_size() == 2 else BLOCK_WIDTH // 4,
        num_warps=4,
        num_stages=3,
        **FUSED,
    )
    pick_winner_kernel[(num_rows,)](
        token_ids,
        best,
        best_id,
        NUM_TILES=num_tiles,
        BLOCK_TILES=next_power_of_2(num_tiles),
        num_warps=4,
        **EXACT,
    )
    return token_ids


def _check(hidden: Tensor, weight: Tensor, keys: Tensor, temperature: Tensor) -> None:
    check_float("hidden", hidden)
    check_contiguous("hidden", hidden)
    check_contiguous("weight", weight)
    num_rows, width = hidden.shape
    check_shape("weight", weight, (weight.shape[0], width))
    check_shape("keys", keys, (num_rows, 2))
    check_shape("temperature", temperature, (num_rows,))
    if num_rows > MAX_HEAD_ROWS:
        raise ValueError(f"hidden must have at most {MAX_HEAD_ROWS} rows, not {num_rows}")
    if weight.dtype != hidden.dtype:
        raise ValueError(f"weight must be {hidden.dtype}, not {weight.dtype}")
