"""The layout of a KV cache of the native ops, see `src/kv_pieces.h`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels.ops import PIECE_SLOTS

_WORD_BYTES = 4
_BLOCKS_AT_ONCE = 64


def count_piece_slots(block_size: int) -> int:
    """Return how many slots of a block lie together in a piece."""
    return math.gcd(block_size, PIECE_SLOTS)


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
        lines = values.view(-1, slots // word_slots, word_slots, num_heads, dim).permute(0, 3, 1, 4, 2)
        values.copy_(lines.clone(memory_format=torch.contiguous_format).view(values.shape))
