"""Size and allocation of the paged KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from engine.config import WorkerConfig
from engine.errors import ConfigError
from engine.kv_cache_spec import KVCacheSpec
from kernels.cpu.panel_memory import map_large_pages

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_kv_dtype(config: WorkerConfig) -> torch.dtype:
    """Return the dtype of keys and values: fp8 if configured, else the model's dtype."""
    return torch.float8_e4m3fn if config.kv_cache_dtype == "fp8" else DTYPES[config.dtype]


def compute_bytes_per_block(specs: Sequence[KVCacheSpec], block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of one block of `block_size` tokens, over all layers, keys and values."""
    return sum(2 * spec.num_kv_heads * spec.head_size for spec in specs) * block_size * dtype.itemsize


def allocate_kv_cache(
    specs: Sequence[KVCacheSpec],
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    free_bytes: int | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """Allocate the cache of every layer, uninitialised. The caller owns it.

    Args:
        specs: one per layer.
        free_bytes: free memory of a host, where an allocation succeeds even if the memory is missing; None: the
            device reports missing memory by an error.

    Returns one (k_cache, v_cache) per layer, each [num_blocks, block_size, num_kv_heads, head_dim],
    contiguous. Block 0 is the null block, used for padding.

    Raises:
        ConfigError: the cache does not fit into the device's memory.
    """
    num_bytes = num_blocks * compute_bytes_per_block(specs, block_size, dtype)
    too_large = (
        f"num_blocks={num_blocks}: {device} cannot allocate a KV cache of {num_bytes / 2**30:.1f} GiB "
        f"({num_bytes} bytes); lower num_blocks or memory_share. "
    )
    if free_bytes is not None and num_bytes > free_bytes:
        raise ConfigError(f"{too_large}{free_bytes / 2**30:.1f} GiB are free")
    shapes = [(num_blocks, block_size, spec.num_kv_heads, spec.head_size) for spec in specs]
    try:
        return [(_allocate(shape, dtype, device), _allocate(shape, dtype, device)) for shape in shapes]
    except (RuntimeError, OSError, OverflowError) as error:  # torch has no subclass for missing memory
        raise ConfigError(too_large + str(error).partition("\n")[0]) from error


def _allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return uninitialised memory; on a CPU in large pages, because a step reads blocks all over it."""
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    return map_large_pages(prod(shape) * dtype.itemsize).view(dtype).view(shape)
