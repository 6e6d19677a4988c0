"""Estimates the scratch memory of native ops, which is their pool's, see `pool_scratch` in `src/pool.h`."""

from __future__ import annotations

from kernels.ops import StepShape

# Constants of `src/attention_tile.h` and `src/attention.cpp`.
_THREAD_TASKS = 4
_TILE_KEYS = 64
_MAX_WORK_ROWS = 48
_SPANS = ((0, 256), (4096, 1024), (16384, 4096))  # (first position, keys of a span)
_PANEL_WIDTH = 32
_WORD_BYTES = 4
_SPREAD_BYTES = 2  # of a code in a spread panel, see `src/grouped.h`
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
    parts = _THREAD_TASKS * num_threads * _count_part_words(shape) * _WORD_BYTES if num_threads > 1 else 0
    panel = widest * _PANEL_WIDTH * _SPREAD_BYTES
    tiles = num_threads * max(panel, _WORD_BYTES * _count_tile_words(shape))
    num_pages = 4 * num_threads + 4
    return (step + parts + tiles) * 5 // 4 + num_pages * _PAGE_BYTES


def _count_tile_words(shape: StepShape) -> int:
    """Words of a thread's piece of attention: queries, copies of keys and values, two results, scores and weights."""
    num_rows, width = _find_sizes(shape)
    return (num_rows * 3 + _TILE_KEYS * 2) * width + num_rows * 2 * (_TILE_KEYS + 4)


def _count_part_words(shape: StepShape) -> int:
    """Words of the sums of all spans of a work that several threads share."""
    starts = [start for start, _ in _SPANS[1:]] + [shape.context_len]
    num_spans = 0
    for (start, keys), end in zip(_SPANS, starts, strict=True):
        num_spans += -(-max(0, min(end, shape.context_len) - start) // keys)
    num_rows, width = _find_sizes(shape)
    return num_spans * num_rows * (width + 2)


def _find_sizes(shape: StepShape) -> tuple[int, int]:
    """Return how many rows a work has at most, and the padded size of a head."""
    num_rows = max(_MAX_WORK_ROWS, shape.num_heads // shape.num_kv_heads)
    return num_rows, -(-shape.head_dim // _PANEL_WIDTH) * _PANEL_WIDTH
