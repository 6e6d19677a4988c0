"""KVCacheSpec and KVCacheGroup: what each layer stores in the KV cache, and which layers share block tables.

The model lists its specs, the worker allocates memory for them, and the KV cache manager counts blocks per group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """What one layer stores per token: a key and a value for each KV head."""

    num_kv_heads: int
    head_size: int
    window: int | None  # tokens that a query attends to, its own included; None: all


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers whose blocks are allocated and freed together."""

    spec: KVCacheSpec  # window: the widest of the layers
    layers: tuple[int, ...]


def group_layers(specs: Sequence[KVCacheSpec]) -> tuple[KVCacheGroup, ...]:
    """Group the layers by number of KV heads and head size.

    Windows may differ within a group: a block is freed when it is outside the widest one.
    """
    found: dict[KVCacheSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        found.setdefault(replace(spec, window=None), []).append(layer)
    return tuple(
        KVCacheGroup(
            replace(shape, window=_find_widest([specs[layer].window for layer in layers])), tuple(layers)
        )
        for shape, layers in found.items()
    )


def _find_widest(windows: Sequence[int | None]) -> int | None:
    widths = [window for window in windows if window is not None]
    return max(widths) if len(widths) == len(windows) else None
