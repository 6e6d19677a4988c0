"""Size and allocation of the paged KV cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.kv_cache_spec import KVCacheSpec, group_layers
from engine.resolved_config import WorkerConfig
from kernels.cpu.panel_memory import PanelMemory
from kernels.ops import INT8_SCALE_BYTES, MAX_INT8_HEAD_DIM

CACHE_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_kv_dtype(config: WorkerConfig) -> torch.dtype:
    """Return the dtype of keys and values: as configured, else the model's dtype."""
    return CACHE_DTYPES.get(config.kv_cache_dtype) or DTYPES[config.dtype]


def _count_stored(spec: KVCacheSpec, dtype: torch.dtype) -> int:
    """Return how many numbers of the cache's dtype hold the keys of one token."""
    if dtype != torch.int8:
        return spec.num_elements
    if not spec.has_values:
        raise ConfigError(
            "kv_cache_dtype='int8': the model has latent attention, whose values are its keys; use auto"
        )
    if spec.head_size % 4 or spec.head_size > MAX_INT8_HEAD_DIM:
        raise ConfigError(
            f"kv_cache_dtype='int8': heads of {spec.head_size} numbers; allowed: multiples of 4 up to "
            f"{MAX_INT8_HEAD_DIM}; use auto"
        )
    return spec.num_elements + spec.num_kv_heads * INT8_SCALE_BYTES


def compute_bytes_per_block(specs: Sequence[KVCacheSpec], block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of one block of `block_size` tokens, keys and values, over all layers of the largest group."""
    groups = group_layers(specs)
    num_elements = max(
        (
            sum((1 + specs[layer].has_values) * _count_stored(specs[layer], dtype) for layer in group.layers)
            for group in groups
        ),
        default=0,
    )
    return num_elements * block_size * dtype.itemsize


def allocate_kv_cache(
    specs: Sequence[KVCacheSpec], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device,
    free_bytes: int | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """Allocate the cache of every layer, uninitialised. The caller owns it.

    Args:
        specs: one per layer.
        free_bytes: free memory of a host, where an allocation succeeds even if the memory is missing; None: the
            device reports missing memory by an error.

    Returns one (k_cache, v_cache) per layer as `kernels.ops.KVCache` says, contiguous; the same tensor
    twice where values are a part of the keys. Layers of different groups share memory, but never a block.
    Block 0 is the null block, used for padding.
    """
    num_bytes = num_blocks * compute_bytes_per_block(specs, block_size, dtype)
    too_large = (
        f"num_blocks={num_blocks}: {device} cannot allocate a KV cache of {num_bytes / 2**30:.1f} GiB "
        f"({num_bytes} bytes); lower num_blocks or memory_share. "
    )
    if free_bytes is not None and num_bytes > free_bytes:
        raise ConfigError(f"{too_large}{free_bytes / 2**30:.1f} GiB are free")
    groups = group_layers(specs)
    largest = max((group.layers for group in groups), key=len, default=())
    caches: list[tuple[Tensor, Tensor] | None] = [None] * len(specs)
    memory = PanelMemory()  # a step reads blocks all over it, and a small cache shares large pages between layers
    try:
        for index, layer in enumerate(largest):
            size = num_blocks * block_size * _count_stored(specs[layer], dtype)
            num_parts = 1 + specs[layer].has_values
            if device.type == "cpu":
                parts = [memory.take(size * dtype.itemsize).view(dtype) for _ in range(num_parts)]
            else:
                parts = [torch.empty(size, dtype=dtype, device=device) for _ in range(num_parts)]
            for sharer in (group.layers[index] for group in groups if index < len(group.layers)):
                shape = (num_blocks, block_size, specs[sharer].num_kv_heads, -1)
                views = [part.view(shape) for part in parts]
                caches[sharer] = views[0], views[-1]
    except (RuntimeError, OSError, OverflowError) as error:  # torch has no subclass for missing memory
        raise ConfigError(too_large + str(error).partition("\n")[0]) from error
    return [cache for cache in caches if cache is not None]
