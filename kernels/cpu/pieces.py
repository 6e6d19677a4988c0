"""The layout of a KV cache of the native ops, see `src/kv_pieces.h`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels.ops import INT8_SCALE_BYTES, MAX_INT8_HEAD_DIM, PIECE_SLOTS

_WORD_BYTES = 4
_BLOCKS_AT_ONCE = 64


def count_piece_slots(block_size: int) -> int:
    """Return how many slots of a block lie together in a piece."""
    return math.gcd(block_size, PIECE_SLOTS)


def count_parts(k_cache: Tensor, v_cache: Tensor) -> int:
    """Return 1 where the values are the keys, in one cache laid out as keys, else 2."""
    return 1 + (k_cache.data_ptr() != v_cache.data_ptr())


def turn_into_pieces(k_cache: Tensor, v_cache: Tensor) -> None:
    """Bring the keys and values of torch's ops, which lie slot after slot, into the layout of the native ops.

    Blocks without a number other than 0 stay as they are, so that memory that was never used is not taken.
    """
    size, num_heads, dim = k_cache.shape[1:]
    slots, width = count_piece_slots(size), _WORD_BYTES // k_cache.itemsize
    word_slots = min(slots, width)
    for keys, values in zip(k_cache.split(_BLOCKS_AT_ONCE), v_cache.split(_BLOCKS_AT_ONCE), strict=True):
        if not (keys.any() or values.any()):
            continue
        lines = keys.view(-1, slots, num_heads, dim // width, width).permute(0, 2, 3, 1, 4)
        keys.copy_(lines.clone(memory_format=torch.contiguous_format).view(keys.shape))
        if count_parts(k_cache, v_cache) == 1:
            continue
        lines = values.view(-1, slots // word_slots, word_slots, num_heads, dim).permute(0, 3, 1, 4, 2)
        values.copy_(lines.clone(memory_format=torch.contiguous_format).view(values.shape))


def check_caches(k_cache: Tensor, v_cache: Tensor, head_dim: int, dtype: torch.dtype) -> None:
    """Check the keys and values of a layer with heads of this size and dtype."""
    is_int8, block_size = k_cache.dtype == torch.int8, k_cache.shape[1]
    unit = 4 if is_int8 else 2
    assert head_dim % unit == 0, f"head_dim={head_dim} must be a multiple of {unit}"
    assert head_dim <= MAX_INT8_HEAD_DIM, f"head_dim={head_dim} must be at most {MAX_INT8_HEAD_DIM}"
    assert not is_int8 or block_size % PIECE_SLOTS == 0, (
        f"block_size={block_size} must be a multiple of {PIECE_SLOTS}"
    )
    shape = (*k_cache.shape[:3], head_dim + INT8_SCALE_BYTES if is_int8 else head_dim)
    for cache in (k_cache, v_cache):
        is_fit = cache.shape == shape and cache.dtype in (dtype, torch.int8) and cache.dtype == k_cache.dtype
        assert is_fit and cache.is_contiguous(), (
            f"a cache must be {list(shape)} {dtype} or int8, not {list(cache.shape)} {cache.dtype}"
        )
