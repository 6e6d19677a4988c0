"""What each layer stores: KVCacheSpec and KVCacheGroup per token, in blocks; StateCacheSpec per request, in slots.

A model whose layers all have one window has one group. Otherwise each window has groups of its own, of equally many
layers, so that a block has the same size in every group and one pool serves them all:

    layers    0 full   1 window   2 window   3 full   4 window   5 window
    groups    full (0, 3)         window (1, 2)       window (4, 5)

A block holds 16 tokens of one group: layer i of each group uses memory i of the block. The model lists its specs, the
worker allocates memory for them, and the KV cache manager counts blocks per group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# More groups save no memory that would be worth their work in each step.
_MAX_GROUPS = 8


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """Storage of one layer per token: a key and a value for each KV head."""

    num_kv_heads: int
    head_size: int
    window: int | None  # tokens that a query attends to, its own included; None: all
    has_values: bool = True  # False: values are the first numbers of the keys

    @property
    def num_elements(self) -> int:
        """Numbers in the keys of one token, and in its values."""
        return self.num_kv_heads * self.head_size


@dataclass(frozen=True, slots=True)
class StateCacheSpec:
    """The state that one layer stores per request instead of keys and values, in float32."""

    conv: tuple[int, int]  # (inputs, channels) of a convolution
    recurrent: tuple[int, int, int]  # (heads, key size, value size); (0, 0, 0): the convolution alone

    @property
    def num_bytes(self) -> int:
        return 4 * (math.prod(self.conv) + math.prod(self.recurrent))


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers whose blocks are allocated and freed together."""

    window: int | None  # the widest of the layers; None: no block is freed while the request runs
    layers: tuple[int, ...]

    def count_blocks(self, num_tokens: int, max_chunk_len: int, block_size: int) -> int:
        """Return how many blocks a request of so many tokens holds at most, in chunks of up to `max_chunk_len`."""
        num_blocks = -(-num_tokens // block_size)
        if self.window is None:
            return num_blocks
        # The blocks at both ends may be used in part.
        return min(num_blocks, -(-(self.window - 1 + max_chunk_len) // block_size) + 1)


def group_layers(specs: Sequence[KVCacheSpec]) -> tuple[KVCacheGroup, ...]:
    """Group the layers by window, those that see all tokens first.

    Layers with several sizes of keys are one group with the widest window: blocks of several sizes would need pools of
    their own.
    """
    if not specs:
        return ()
    by_window: dict[int | None, list[int]] = {}
    for layer, spec in enumerate(specs):
        by_window.setdefault(spec.window, []).append(layer)
    windows = sorted(by_window, key=lambda window: (window is not None, window))
    if len(windows) == 1 or len({spec.num_elements for spec in specs}) > 1:
        widest = None if None in windows else windows[-1]
        return (KVCacheGroup(widest, tuple(range(len(specs)))),)
    size = max(min(map(len, by_window.values())), -(-len(specs) // _MAX_GROUPS))
    return tuple(
        KVCacheGroup(window, tuple(by_window[window][at : at + size]))
        for window in windows
        for at in range(0, len(by_window[window]), size)
    )


def find_groups(specs: Sequence[KVCacheSpec]) -> list[int]:
    found = [0] * len(specs)
    for index, group in enumerate(group_layers(specs)):
        for layer in group.layers:
            found[layer] = index
    return found
