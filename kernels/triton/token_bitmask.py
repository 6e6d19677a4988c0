"""Applies grammar masks to logits. A mask is a row of int32 words with one bit per token."""

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
    row_stride: tl.tensor,
    mask_stride: tl.tensor,
    num_words: tl.tensor,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = token // 32
    words = tl.load(bitmask_ptr + row * mask_stride + word, mask=word < num_words, other=0)
    is_forbidden = ((words >> (token % 32)) & 1) == 0
    forbidden = tl.full([BLOCK], float("-inf"), logits_ptr.dtype.element_ty)
    tl.store(logits_ptr + row * row_stride + token, forbidden, mask=is_forbidden & (token < VOCAB))


def apply_bitmask(logits: Tensor, bitmask: Tensor) -> None:
    """Set the logits of forbidden tokens to -inf, in place; see `kernels.torch.sampling.apply_bitmask`."""
    check_float("logits", logits)
    check_rows("logits", logits)
    check_rows("bitmask", bitmask)
    if bitmask.dtype != torch.int32:
        raise ValueError(f"bitmask must be int32, not {bitmask.dtype}")
    num_rows, vocab_size = logits.shape
    num_words = bitmask.shape[1]
    check_shape("bitmask", bitmask, (num_rows, num_words))
    if num_rows:
        apply_bitmask_kernel[(num_rows, triton.cdiv(vocab_size, BLOCK))](
            logits,
            bitmask,
            logits.stride(0),
            bitmask.stride(0),
            num_words,
            VOCAB=vocab_size,
            BLOCK=BLOCK,
            num_warps=4,
            **FUSED,
        )
