"""Head norms, RoPE and the write into the paged cache in one pass over the QKV product."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.fp8 import encode_e4m3
from kernels.triton.launch import (
    FUSED,
    check_contiguous,
    check_float,
    check_rows,
    make_output,
    next_power_of_2,
)

# Elements that one program holds; a token's heads are spread over as many programs as that takes.
PROGRAM_ELEMENTS = 2048


@triton.jit
def norm_rope_store_kernel(
    q_ptr: tl.tensor,
    heads_ptr: tl.tensor,
    qk_norm_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    token_stride: tl.tensor,
    eps: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_FP8: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    HALF: tl.constexpr = HEAD_DIM // 2
    NUM_ROTATED: tl.constexpr = NUM_HEADS + NUM_KV_HEADS
    column = tl.arange(0, BLOCK_HALF)[None, :]
    in_half = column < HALF
    mask = (head < NUM_ROTATED + NUM_KV_HEADS)[:, None] & in_half
    offsets = head[:, None] * HEAD_DIM + column
    token_heads = heads_ptr + token * token_stride
    first = tl.load(token_heads + offsets, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(token_heads + offsets + HALF, mask=mask, other=0.0).to(tl.float32)
    is_rotated = (head < NUM_ROTATED)[:, None]

    normed_first, normed_second = first, second
    if HAS_NORM:
        mean_square = (tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / HEAD_DIM
        scale = tl.rsqrt(mean_square + eps)[:, None]
        has_weight = is_rotated & in_half
        weight = tl.load(qk_norm_ptr + offsets, mask=has_weight, other=0.0).to(tl.float32)
        normed_first = first * scale * weight
        weight = tl.load(qk_norm_ptr + offsets + HALF, mask=has_weight, other=0.0).to(tl.float32)
        normed_second = second * scale * weight

    angles = token * HEAD_DIM + column
    cos = tl.load(cos_ptr + angles, mask=in_half, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + angles, mask=in_half, other=0.0).to(tl.float32)
    rotated_first = normed_first * cos + normed_second * sin
    cos = tl.load(cos_ptr + angles + HALF, mask=in_half, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + angles + HALF, mask=in_half, other=0.0).to(tl.float32)
    rotated_second = normed_second * cos + normed_first * sin
    first = tl.where(is_rotated, rotated_first, first)
    second = tl.where(is_rotated, rotated_second, second)

    is_query = (head < NUM_HEADS)[:, None] & in_half
    q_token = q_ptr + token * (NUM_HEADS * HEAD_DIM)
    tl.store(q_token + offsets, first.to(q_ptr.dtype.element_ty), mask=is_query)
    tl.store(q_token + offsets + HALF, second.to(q_ptr.dtype.element_ty), mask=is_query)

    slot = tl.load(slot_ptr + token).to(tl.int64)
    # A slot below 0 stores no head.
    num_stored = tl.where(slot >= 0, NUM_ROTATED + NUM_KV_HEADS, 0)
    is_stored = mask & (head < num_stored)[:, None]
    if IS_FP8:
        stored_first, stored_second = encode_e4m3(first), encode_e4m3(second)
    else:
        stored_first = first.to(k_cache_ptr.dtype.element_ty)
        stored_second = second.to(k_cache_ptr.dtype.element_ty)
    is_key = is_stored & (head >= NUM_HEADS)[:, None] & is_rotated
    k_token = k_cache_ptr + slot * (NUM_KV_HEADS * HEAD_DIM) - NUM_HEADS * HEAD_DIM
    tl.store(k_token + offsets, stored_first, mask=is_key)
    tl.store(k_token + offsets + HALF, stored_second, mask=is_key)
    is_value = is_stored & (head >= NUM_ROTATED)[:, None]
    v_token = v_cache_ptr + slot * (NUM_KV_HEADS * HEAD_DIM) - NUM_ROTATED * HEAD_DIM
    tl.store(v_token + offsets, stored_first, mask=is_value)
    tl.store(v_token + offsets + HALF, stored_second, mask=is_value)


def norm_rope_store(
    heads: Tensor,
    qk_norm: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    num_heads: int,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Implement `kernels.ops.NormRopeStore`; the queries are rounded once.

    Args:
        heads: left as they are; tokens may be further apart than their size.
        k_cache, v_cache: torch.float8_e4m3fn saturates.
        slot_mapping: below 0: no write.
        out: the queries are written here when given.
    """
    num_tokens, total, head_dim = heads.shape
    num_kv_heads = k_cache.shape[2]
    check_float("heads", heads)
    check_rows("heads", heads)
    check_contiguous("k_cache", k_cache)
    check_contiguous("v_cache", v_cache)
    if total != num_heads + 2 * num_kv_heads or k_cache.shape[3] != head_dim or head_dim % 2:
        raise ValueError(f"heads {tuple(heads.shape)} do not fit {num_heads} heads of {tuple(k_cache.shape)}")
    if cos.numel() != num_tokens * head_dim or cos.dtype != torch.float32 or sin.shape != cos.shape:
        raise ValueError(f"cos and sin must be [{num_tokens}, 1, {head_dim}] float32, not {tuple(cos.shape)}")
    if tuple(slot_mapping.shape) != (num_tokens,):
        raise ValueError(f"slot_mapping must be [{num_tokens}], not {tuple(slot_mapping.shape)}")
    q = make_output(out, (num_tokens, num_heads, head_dim), heads)
    is_fp8 = k_cache.dtype == torch.float8_e4m3fn
    block_half = next_power_of_2(head_dim // 2)
    block_heads = max(1, min(PROGRAM_ELEMENTS // (2 * block_half), next_power_of_2(total)))
    if num_tokens:
        norm_rope_store_kernel[(num_tokens, triton.cdiv(total, block_heads))](
            q,
            heads,
            heads if qk_norm is None else qk_norm.contiguous(),
            cos.contiguous(),
            sin.contiguous(),
            k_cache.view(torch.uint8) if is_fp8 else k_cache,
            v_cache.view(torch.uint8) if is_fp8 else v_cache,
            slot_mapping,
            heads.stride(0),
            eps,
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            HAS_NORM=qk_norm is not None,
            IS_FP8=is_fp8,
            BLOCK_HEADS=block_heads,
            BLOCK_HALF=block_half,
            num_warps=4,
            **FUSED,
        )
    return q
