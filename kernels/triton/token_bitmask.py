"""Grammar masks applied to logits as they come, 32 tokens a word."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import FUSED, check_float, check_rows, check_shape

BLOCK = 2048


@triton.jit(do_not_specialize=["num_words"])
def apply_bitmask_kernel(
    logits_ptr: tl.tensor,
    bitmask_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    row_stride: tl.tensor,
    mask_stride: tl.tensor,
    num_words: tl.tensor,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    mask_row = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + mask_row).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = token // 32
    words = tl.load(bitmask_ptr + mask_row * mask_stride + word, mask=word < num_words, other=0)
    is_forbidden = ((words >> (token % 32)) & 1) == 0
    forbidden = tl.full([BLOCK], float("-inf"), logits_ptr.dtype.element_ty)
    mask = is_forbidden & (token < tl.where(row >= 0, VOCAB, 0))
    tl.store(logits_ptr + row * row_stride + token, forbidden, mask=mask)


def apply_bitmask(logits: Tensor, bitmask: Tensor, rows: Tensor) -> None:
    """Set the logits of forbidden tokens to -inf, in place; see `kernels.token_bitmask.apply_bitmask`."""
    check_float("logits", logits)
    check_rows("logits", logits)
    check_rows("bitmask", bitmask)
    check_shape("rows", rows, (bitmask.shape[0],))
    if bitmask.dtype != torch.int32:
        raise ValueError(f"bitmask must be int32, not {bitmask.dtype}")
    num_masks, num_words = bitmask.shape
    vocab_size = logits.shape[1]
    if num_masks:
        apply_bitmask_kernel[(num_masks, triton.cdiv(vocab_size, BLOCK))](
            logits,
            bitmask,
            rows,
            logits.stride(0),
            bitmask.stride(0),
            num_words,
            VOCAB=vocab_size,
            BLOCK=BLOCK,
            num_warps=4,
            **FUSED,
        )
