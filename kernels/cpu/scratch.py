"""Estimates the scratch memory of native ops, which is their pool's, see `pool_scratch` in `src/pool.h`."""

from __future__ import annotations

from kernels.ops import StepShape

# Constants of `src/attention_tile.h` and `src/attention.cpp`.
_TILE_KEYS = 64
_MAX_WORK_ROWS = 48
_WORK_BYTES = 20
_PANEL_WIDTH = 32
_WORD_BYTES = 4
_PAGE_BYTES = 4096


def estimate_scratch(shape: StepShape, num_threads: int) -> int:
    """Return the largest number of bytes that a pool holds after a step and keeps for the next one.

    The pool allocates 25 % more than a step needs.
    """
    q_size = shape.num_heads * shape.head_dim
    kv_size = shape.num_kv_heads * shape.head_dim
    widest = max(shape.hidden_size, q_size, shape.inner_size)
    # Activations between the ops of a layer, and a copy of a product's rows in panel layout.
    width = 2 * shape.hidden_size + 3 * q_size + 2 * kv_size + 3 * shape.inner_size
    step = shape.num_tokens * (width * shape.itemsize + (widest + 1) * _WORD_BYTES)
    works = (shape.num_tokens + shape.num_requests + 1) * shape.num_kv_heads * _WORK_BYTES
    tiles = num_threads * _WORD_BYTES * max(widest, _count_tile_words(shape))
    num_pages = 4 * num_threads + 4
    return (step + works + tiles) * 5 // 4 + num_pages * _PAGE_BYTES


def _count_tile_words(shape: StepShape) -> int:
    """Words of a thread's piece of attention: queries, keys, values and result of a tile, and its scores twice."""
    num_rows = max(_MAX_WORK_ROWS, shape.num_heads // shape.num_kv_heads)
    width = -(-shape.head_dim // _PANEL_WIDTH) * _PANEL_WIDTH
    return (num_rows + _TILE_KEYS) * 2 * width + num_rows * 2 * (_TILE_KEYS + 1) + width
