"""KVCacheSpec and KVCacheGroup: what the layers of a model keep in the KV cache, and which of them share block tables.

The model states its specs, the worker allocates memory by them, and the KV cache manager counts blocks by group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """What one layer keeps of each token: a key and a value per KV head."""

    num_kv_heads: int
    head_size: int
    window: int | None  # tokens that a query sees, itself included; None: all


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers whose blocks are allocated and freed together."""

    spec: KVCacheSpec  # its window is the widest of the layers'
    layers: tuple[int, ...]


def group_layers(specs: Sequence[KVCacheSpec]) -> tuple[KVCacheGroup, ...]:
    """Put layers with keys of one shape into one group.

    Windows may differ within a group: a block stays until it has left the widest of them.
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
