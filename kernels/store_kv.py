"""Write the keys and values of a step into the paged cache."""

from __future__ import annotations

from torch import Tensor


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write one key and one value per token into its slot, in place.

    Args:
        k, v: [T, num_kv_heads, head_dim], any strides over tokens.
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], contiguous.
        slot_mapping: [T] int64, `block_id * block_size + offset`. Padding tokens point into the null block;
            real slots do not repeat.
    """
    k_cache.flatten(0, 1).index_copy_(0, slot_mapping, k)
    v_cache.flatten(0, 1).index_copy_(0, slot_mapping, v)
