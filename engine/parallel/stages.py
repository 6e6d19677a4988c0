"""Stages: which layers each stage of a pipeline holds, and how large the messages between stages may be."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.device.kv_cache import DTYPES
from engine.errors import ConfigError
from engine.kv_cache_spec import group_layers
from engine.model.config import ModelConfig
from engine.model.implementation import TransformersConfig
from engine.model.layer_spec import LayerSpec
from engine.model.weight_memory import measure_layer
from engine.resolved_config import WorkerConfig

_MAX_STREAMS = 8  # tensors [T, D] in one message: two, and inputs of layers for a draft head


def split_layers(config: ModelConfig, num_stages: int) -> list[tuple[int, int]]:
    """Return [first, end) of each stage's layers.

    A stage takes as long in a decode as its matrices are large. The first one has the output head, too, so it gets
    fewer layers.
    """
    name, num_layers = f"pipeline_parallel_size={num_stages}", config.num_hidden_layers
    if isinstance(config, TransformersConfig):
        raise ConfigError(f"{name} needs our decoder; {config.architecture} runs on the code of transformers")
    if num_stages > num_layers:
        raise ConfigError(f"{name} exceeds the model's {num_layers} layers")
    head = config.vocab_size * config.hidden_size / count_layer_numbers(config.layer_specs[-1])
    share = round((num_layers + head) / num_stages - head)
    first = min(max(1, share), num_layers - num_stages + 1)
    rest, others = num_layers - first, num_stages - 1
    ends = [first + rest * index // others for index in range(num_stages)]
    return list(zip([0, *ends], ends, strict=False))


def count_layer_numbers(spec: LayerSpec) -> int:
    """Return how many elements of a layer's matrices a token is multiplied with."""
    size = measure_layer(spec)
    if spec.moe is None:
        return size.matrices
    return size.matrices - size.experts + size.experts * spec.moe.top_k // spec.moe.num_experts


def compute_context_cost(config: ModelConfig) -> float:
    """Return the cost of attending to one more token, relative to the other products of a token."""
    specs = [spec for spec in config.layer_specs if spec.window is None]
    context = sum(4 * spec.num_heads * spec.head_size for spec in specs)
    return context / sum(2 * count_layer_numbers(spec) for spec in config.layer_specs)


def count_message_bytes(config: EngineConfig, worker: WorkerConfig, model: ModelConfig) -> int:
    """Return the size of the largest message between two stages: the integers of a step, and hidden states."""
    num_rows, num_tokens = config.find_step_limits(worker.device)
    length = config.max_model_len or model.max_model_len
    if not config.enable_chunked_prefill:
        num_tokens = max(num_tokens, length)
    num_groups = len(group_layers([spec.kv_spec for spec in model.layer_specs]))
    num_integers = (2 + num_groups) * num_tokens + (
        2 + num_groups * -(-length // config.block_size)
    ) * num_rows
    hidden_bytes = num_tokens * model.hidden_size * DTYPES[worker.dtype].itemsize
    return -(-(8 * num_integers + _MAX_STREAMS * hidden_bytes) // 4096 + 1) * 4096
