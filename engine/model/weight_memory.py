"""Compares the memory that weights need with the device's free memory, before they are allocated.

On the CPU an allocation succeeds even if the memory is missing; the kernel would kill the process during loading.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from engine.errors import ConfigError
from engine.host_memory import measure_host_memory
from engine.model.config import ModelConfig
from engine.model.decoder_layer import STATE_LAYERS
from engine.model.implementation import TransformersConfig
from engine.model.layer_spec import LayerSpec
from kernels.cpu.weights import WEIGHT_BYTES, estimate_packed_bytes
from kernels.ops import Quantization

_CODE_BYTES = 9 / 8  # of an element in 8 bits, with its share of scales and minimums
_CPU_ALLOCATOR = "DefaultCPUAllocator"  # in the message of torch's error about missing RAM


def count_parameters(config: ModelConfig) -> int:
    if isinstance(config, TransformersConfig):
        return config.num_parameters
    style, hidden, head_dim = config.style, config.hidden_size, config.head_dim
    q_size = config.num_attention_heads * head_dim
    kv_size = config.num_key_value_heads * head_dim
    num_up = 1 + style.is_gated
    biases = config.qkv_bias * (q_size + 2 * kv_size) + config.output_bias * hidden
    mlp_biases = config.mlp_bias * (num_up * config.intermediate_size + hidden)
    norm_size = hidden * (1 + style.norm_bias)
    norms = {"parallel": 1, "sandwich": 4}.get(style.placement, 2) * norm_size
    head_norms = (style.qk_norm != "none") * (q_size + kv_size) + style.has_sinks * config.num_attention_heads
    num_tables = 1 if config.tie_word_embeddings else 2
    moes = [spec.moe for spec in config.layer_specs if spec.moe is not None]
    rest = sum(moe.count_parameters(hidden) - moe.count_matrix_numbers(hidden) for moe in moes)
    rest += (config.num_hidden_layers - len(moes)) * mlp_biases
    states = [spec for spec in config.layer_specs if spec.state is not None]
    rest += sum(total - matrices for total, matrices in map(_count_state_layer, states))
    if config.latent is not None:
        head_norms = config.latent.rank + (config.latent.query_rank or 0)
    rest += (config.num_hidden_layers - len(states)) * (biases + head_norms)
    layers = config.num_hidden_layers * norms + _count_matrix_numbers(config) + rest
    return layers + hidden * num_tables * config.vocab_size + norm_size


def _count_matrix_numbers(config: ModelConfig) -> int:
    """Return the number of elements in the matrices of all layers, experts included."""
    num_heads = (2 + config.style.has_output_gate) * config.num_attention_heads
    num_heads += 2 * config.num_key_value_heads
    attention = config.hidden_size * num_heads * config.head_dim
    if config.latent is not None:
        attention = config.latent.count_numbers(config.hidden_size, config.num_attention_heads)
    mixers = sum(
        attention if spec.state is None else _count_state_layer(spec)[1] for spec in config.layer_specs
    )
    mlp_width = (2 + config.style.is_gated) * config.intermediate_size
    moes = [spec.moe for spec in config.layer_specs]
    blocks = sum(
        config.hidden_size * mlp_width if moe is None else moe.count_matrix_numbers(config.hidden_size)
        for moe in moes
    )
    return mixers + blocks


def _count_state_layer(spec: LayerSpec) -> tuple[int, int]:
    """Return the number of parameters of a layer with a state, without its norms, and those in its matrices."""
    assert spec.state is not None, "the layer has a state"
    layer = STATE_LAYERS[spec.state.kind](spec, torch.float32, torch.device("meta"))
    sizes = {name: parameter.numel() for name, parameter in layer.named_parameters()}
    return sum(sizes.values()), sizes["in_proj.weight"] + sizes["out_proj.weight"]


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
    """Return the bytes of a model on the native ops, which pack each matrix as it is read."""
    if keeps_codes:
        return int(count_parameters(config) * _CODE_BYTES)
    itemsize = _packed_itemsize(config, dtype, quantization)
    matrices, table = _count_matrix_numbers(config), config.vocab_size * config.hidden_size
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
        return measure_host_memory()[1]
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


@contextmanager
def check_weight_memory(
    name: str | Path, config: ModelConfig, dtype: torch.dtype, device: torch.device,
    quantization: Quantization | None = None, is_native: bool = False, keeps_codes: bool = False,
    num_ranks: int = 1,
) -> Iterator[None]:
    """Reject a model whose weights do not fit, at once or when an allocation in the block fails.

    Args:
        dtype: dtype of all weights until they are packed, including those to be quantized.
        is_native: whether the native ops pack each matrix of the decoder as it is read.
        keeps_codes: whether matrices keep the codes of the checkpoint, in 4 to 8 bits.
    """
    num_bytes, free_bytes = count_parameters(config) * dtype.itemsize, measure_free_bytes(device)
    if is_native and not isinstance(config, TransformersConfig):
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
