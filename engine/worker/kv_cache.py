"""The memory of the paged KV cache: its size per block and its allocation."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.config import WorkerConfig
from engine.errors import ConfigError
from engine.model.config import ModelConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_kv_dtype(config: WorkerConfig) -> torch.dtype:
    """Return the dtype of keys and values: the model's, unless the config asks for fewer bits."""
    return torch.float8_e4m3fn if config.kv_cache_dtype == "fp8" else DTYPES[config.dtype]


def compute_bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes that one block of `block_size` tokens takes over all layers, keys and values."""
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return per_token * block_size * dtype.itemsize


def allocate_kv_cache(
    config: ModelConfig,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    free_bytes: int | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """Allocate the cache of every layer, uninitialised. The caller owns it.

    Args:
        free_bytes: what the device has left, where allocating only reserves and a lack of memory shows much later.
            None: the device says so by itself.

    Returns one (k_cache, v_cache) per layer, each [num_blocks, block_size, num_kv_heads, head_dim],
    contiguous. Block 0 is the null block: padding points there.

    Raises:
        ConfigError: the device has no room for them.
    """
    shape = (num_blocks, block_size, config.num_key_value_heads, config.head_dim)
    num_bytes = num_blocks * compute_bytes_per_block(config, block_size, dtype)
    no_room = (
        f"num_blocks={num_blocks}: {device} has no room for a KV cache of {num_bytes / 2**30:.1f} GiB "
        f"({num_bytes} bytes); lower num_blocks or memory_share. "
    )
    if free_bytes is not None and num_bytes > free_bytes:
        raise ConfigError(f"{no_room}{free_bytes / 2**30:.1f} GiB are free")
    try:
        return [
            (torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device))
            for _ in range(config.num_hidden_layers)
        ]
    except RuntimeError as error:  # all that torch says of a lack of memory, or of a size beyond 64 bits
        raise ConfigError(no_room + str(error).partition("\n")[0]) from error
