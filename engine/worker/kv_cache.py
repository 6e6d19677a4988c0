"""The memory of the paged KV cache: its size per block and its allocation."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.model.config import ModelConfig

# Of the config's `kv_cache_dtype`; "auto" is the model's.
KV_DTYPES = {"fp8": torch.float8_e4m3fn}


def compute_bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes that one block of `block_size` tokens takes over all layers, keys and values."""
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return per_token * block_size * dtype.itemsize


def allocate_kv_cache(
    config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> list[tuple[Tensor, Tensor]]:
    """Allocate the cache of every layer, uninitialised. The caller owns it.

    Returns one (k_cache, v_cache) per layer, each [num_blocks, block_size, num_kv_heads, head_dim],
    contiguous. Block 0 is the null block: padding points there.

    Raises:
        ConfigError: the device has no room for them.
    """
    shape = (num_blocks, block_size, config.num_key_value_heads, config.head_dim)
    try:
        return [
            (torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device))
            for _ in range(config.num_hidden_layers)
        ]
    except RuntimeError as error:  # all that torch says of a lack of memory, or of a size beyond 64 bits
        size = num_blocks * compute_bytes_per_block(config, block_size, dtype) / 2**30
        raise ConfigError(
            f"num_blocks={num_blocks}: {device} has no room for a KV cache of {size:.0f} GiB; lower num_blocks "
            f"or memory_share. {str(error).partition(chr(10))[0]}"
        ) from error
