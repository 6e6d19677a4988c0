"""Write the keys and values of a step into the paged cache, and read slots of it.

A cache in float8 (e4m3) holds half of what bfloat16 takes: values are clamped to +-448 and rounded to 4 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
_FP8_MAX = torch.finfo(FP8).max


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write one key and one value per token into its slot, in place.

    Args:
        k, v: [T, num_kv_heads, head_dim], any strides over tokens.
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], contiguous, dtype of k or float8.
        slot_mapping: [T] int64, `block_id * block_size + offset`. Padding tokens point into the null block;
            real slots do not repeat.
    """
    if k_cache.dtype == FP8:
        # Indexing knows no float8; the bytes are moved.
        k, v = (each.clamp(-_FP8_MAX, _FP8_MAX).to(FP8).view(torch.uint8) for each in (k, v))
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    k_cache.flatten(0, 1).index_copy_(0, slot_mapping, k)
    v_cache.flatten(0, 1).index_copy_(0, slot_mapping, v)


def take_slots(cache: Tensor, slots: Tensor) -> Tensor:
    """Copy slots [n] of a flattened cache [num_slots, num_kv_heads, head_dim], dtype of the cache."""
    if cache.dtype == FP8:
        return cache.view(torch.uint8).index_select(0, slots).view(FP8)
    return cache.index_select(0, slots)
