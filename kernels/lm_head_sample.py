"""The last product and the draw in one call, for small batches of rows that nothing edits."""

from __future__ import annotations

from torch import Tensor

from kernels.device_kernels import find_device_kernels
from kernels.linear import linear
from kernels.sampling import draw_full, draw_greedy
from kernels.token_bitmask import apply_bitmask

# Above this many rows the product deserves cuBLAS.
MAX_ROWS = 64


def lm_head_sample(
    hidden: Tensor,
    weight: Tensor,
    keys: Tensor,
    temperature: Tensor,
    bitmask: Tensor | None = None,
    mask_rows: Tensor | None = None,
) -> Tensor:
    """Draw one token per row from softmax(hidden W^T / temperature) over the tokens that its mask allows.

    Args:
        hidden: [R, M], contiguous, at most 64 rows.
        weight: [V, M], dtype of hidden; contiguous on CUDA.
        keys: [R, 2] int32 from `kernels.sampling.make_row_keys`.
        temperature: [R] float32; 0: the best token.
        bitmask: [B, W] int32, contiguous, bit 1 = allowed; tokens beyond the last word are forbidden.
        mask_rows: [R] the mask of each row, -1: none.

    Returns [R] int64; -1 where no token is allowed or a product is NaN or +inf.
    """
    kernels = find_device_kernels(hidden.device.type, "lm_head_sample")
    if kernels is not None:
        drawn: Tensor = kernels.lm_head_sample(hidden, weight, keys, temperature, bitmask, mask_rows)
        return drawn
    logits = linear(hidden, weight, None).float()
    is_sound = logits.amax(dim=-1) < float("inf")
    if bitmask is not None and mask_rows is not None:
        rows = (mask_rows >= 0).nonzero().flatten()
        apply_bitmask(logits, bitmask.index_select(0, mask_rows[rows].long()), rows)
    is_greedy = temperature <= 0
    greedy = draw_greedy(logits)
    if bool(is_greedy.all()):
        return greedy.where(is_sound, -1)
    drawn = draw_full(logits, keys, temperature.masked_fill(is_greedy, 1.0), None)
    return greedy.where(is_greedy, drawn).where(is_sound, -1)
