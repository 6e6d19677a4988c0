"""Compares the memory that weights need with the device's free memory, before they are allocated.

On the CPU an allocation succeeds even if the memory is missing; the kernel would kill the process during loading.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

from engine.errors import ConfigError
from engine.host_memory import measure_host_memory, measure_unified_memory
from engine.model.config import ModelConfig
from engine.model.decoder_layer import DecoderLayer
from engine.model.implementation import EncoderConfig, TransformersConfig
from engine.model.layer_spec import LayerSpec
from engine.model.linear import Linear
from engine.model.moe import Experts
from engine.model.sharding import ONE_RANK
from kernels.cpu.weights import WEIGHT_BYTES, estimate_packed_bytes
from kernels.ops import Quantization

_CODE_BYTES = 9 / 8  # of an element in 8 bits, with its share of scales and minimums
_CPU_ALLOCATOR = "DefaultCPUAllocator"  # in the message of torch's error about missing RAM


class LayerSize(NamedTuple):
    """Numbers of elements in one layer."""

    parameters: int
    matrices: int  # of these, in matrices that the ops pack
    experts: int  # of these, in experts that a router chooses
    largest: int  # in one matrix, or in all experts


def count_parameters(config: ModelConfig) -> int:
    if isinstance(config, TransformersConfig):
        return config.num_parameters
    num_tables = 1 if config.tie_word_embeddings else 2
    norm_size = config.hidden_size * (1 + config.style.norm_bias)
    layers = sum(measure_layer(spec).parameters for spec in config.layer_specs)
    return layers + config.hidden_size * num_tables * config.vocab_size + norm_size


@lru_cache(maxsize=64)
def measure_layer(spec: LayerSpec) -> LayerSize:
    """Return the sizes of a layer.

    Raises:
        ConfigError: it is larger than any memory.
    """
    try:
        layer = DecoderLayer(spec, 0, 0, 0, torch.float32, torch.device("meta"), ONE_RANK)
    except RuntimeError as error:
        raise ConfigError(f"hidden_size={spec.hidden_size}: the layers are too large: {error}") from error
    packed = [each for each in layer.modules() if isinstance(each, Linear | Experts)]
    sizes = [(each, sum(part.numel() for part in each.parameters() if part.dim() > 1)) for each in packed]
    return LayerSize(
        parameters=sum(parameter.numel() for parameter in layer.parameters()),
        matrices=sum(size for _, size in sizes),
        experts=sum(size for each, size in sizes if isinstance(each, Experts)),
        largest=max(size for _, size in sizes),
    )


def estimate_head_copy(
    config: ModelConfig, dtype: torch.dtype, quantization: Quantization | None = None
) -> int:
    """Return the bytes of the packed copy of a tied head, which the native ops keep in addition to the embedding.

    Zero if the head is not tied, because packing then replaces it.
    """
    if not config.tie_word_embeddings:
        return 0
    itemsize = _packed_itemsize(config, dtype, "int8" if quantization == "int4" else quantization)
    return estimate_packed_bytes(config.vocab_size, config.hidden_size, itemsize)


def _estimate_native_bytes(
    config: ModelConfig, dtype: torch.dtype, quantization: Quantization | None, keeps_codes: bool
) -> int:
    """Return the bytes of a model whose matrices are packed as they are read, as they are in codes on all ops."""
    if keeps_codes:
        return int(count_parameters(config) * _CODE_BYTES)
    itemsize = _packed_itemsize(config, dtype, quantization)
    matrices = sum(measure_layer(spec).matrices for spec in config.layer_specs)
    table = config.vocab_size * config.hidden_size
    heads = 0 if config.tie_word_embeddings else table
    rest = count_parameters(config) - matrices - table - heads
    # A tied head is one matrix with the embedding, unless it is rounded.
    head_itemsize = _packed_itemsize(config, dtype, "int8" if quantization == "int4" else quantization)
    head_bytes = (heads if quantization is None else table) * head_itemsize
    table_bytes = table * _packed_itemsize(config, dtype, None)
    return int(matrices * itemsize + head_bytes + table_bytes) + rest * dtype.itemsize


def _packed_itemsize(config: ModelConfig, dtype: torch.dtype, quantization: Quantization | None) -> float:
    """Return the bytes per element of packed weights. The native ops keep bfloat16 checkpoints in two bytes."""
    if quantization == "int4":
        return (WEIGHT_BYTES["int4"] + WEIGHT_BYTES["int6"]) / 2  # about half of the matrices have 6 bits
    if quantization in WEIGHT_BYTES:
        return WEIGHT_BYTES[quantization]
    return min(dtype.itemsize, torch.bfloat16.itemsize) if config.dtype == "bfloat16" else dtype.itemsize


def measure_free_bytes(device: torch.device) -> int:
    """Return the bytes available for new tensors on a device."""
    if device.type != "cuda":
        return (measure_unified_memory if device.type == "mps" else measure_host_memory)()[1]
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


@contextmanager
def check_weight_memory(
    name: str | Path, config: ModelConfig, dtype: torch.dtype, device: torch.device,
    quantization: Quantization | None = None, is_native: bool = False, keeps_codes: bool = False,
    num_ranks: int = 1, has_split: bool = False,
) -> Iterator[None]:
    """Reject a model whose weights do not fit, at once or when an allocation in the block fails.

    Args:
        dtype: dtype of all weights until they are packed, including those to be quantized.
        is_native: whether the native ops pack each matrix of the decoder as it is read.
        keeps_codes: whether matrices keep the codes of the checkpoint, in 4 to 8 bits.
        has_split: whether the ops have `pack_split`, which encoders take and which keeps three numbers of 16 bits.
    """
    num_bytes, free_bytes = count_parameters(config) * dtype.itemsize, measure_free_bytes(device)
    if has_split and isinstance(config, EncoderConfig) and dtype == torch.float32 and quantization is None:
        num_bytes = num_bytes * 3 // 2
    if (is_native or keeps_codes) and not isinstance(config, TransformersConfig):
        num_bytes = _estimate_native_bytes(config, dtype, quantization, keeps_codes)
    if num_ranks > 1:
        embedding_bytes = config.vocab_size * config.hidden_size * dtype.itemsize
        num_bytes = embedding_bytes + (num_bytes - embedding_bytes) // num_ranks
    if num_bytes > free_bytes:
        gc.collect()  # may free the previous model
        free_bytes = measure_free_bytes(device)
    form = quantization if is_native and quantization else str(dtype).removeprefix("torch.")
    message = (
        f"model {str(name)!r} does not fit: {count_parameters(config)} parameters take {_format_bytes(num_bytes)} as "
        f"{form}, and {device.type} has {_format_bytes(free_bytes)} free"
        f"{_hint(num_bytes, free_bytes, dtype, quantization, is_native)}"
    )
    if num_bytes > free_bytes:
        raise ConfigError(message)
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and _CPU_ALLOCATOR not in str(error):
            raise
        raise ConfigError(f"{message}. {str(error).partition(chr(10))[0]}") from error


def _hint(
    num_bytes: int, free_bytes: int, dtype: torch.dtype, quantization: Quantization | None, is_native: bool
) -> str:
    if is_native:
        return "" if quantization == "int4" else "; quantization='int4' takes less"
    if dtype.itemsize > 2 and num_bytes // 2 <= free_bytes:
        return "; dtype='bfloat16' takes half of that"
    # Other ops round matrices after all are loaded.
    return "" if quantization is None else f"; quantization={quantization!r} saves memory after loading only"


def _format_bytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
