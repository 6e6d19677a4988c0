"""EncoderRows: marks the second texts of pairs; and the settings of an engine whose model is an encoder."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from engine.config import EngineConfig
from engine.core.actor_messages import NewRow
from engine.errors import ConfigError
from engine.model.implementation import EncoderConfig
from engine.worker.launched_step import StartedStep
from kernels.upload import upload

# Settings for what an encoder does not do, with their neutral values.
_NEUTRAL = {
    "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "speculative_config": None, "enable_lora": False,
    "kv_offload_gb": 0.0, "kv_transfer_config": None, "long_prefill_token_threshold": 0,
}


class EncoderRows:
    """The token types of a step. A row without a second text has zeros."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._second: dict[int, int] = {}  # row -> first token of the second text

    def add(self, new_row: NewRow) -> None:
        self.remove(new_row.row)
        pooling = new_row.params.pooling
        if pooling is not None and pooling.second_start is not None:
            self._second[new_row.row] = pooling.second_start

    def remove(self, row: int) -> None:
        self._second.pop(row, None)

    def mark(self, step: StartedStep) -> None:
        if not self._second:
            return
        types = np.zeros(int(step.counts.sum()), dtype=np.int64)
        for row, _, _, count, first in step.list_runs():
            types[first + self._second.get(row, count) : first + count] = 1
        metadata = replace(step.model_input.attn_metadata, token_types=upload(types, self._device))
        step.model_input = replace(step.model_input, attn_metadata=metadata)


def adapt_config(config: EngineConfig, model: EncoderConfig) -> EngineConfig:
    """Return the config with whole texts in a step and nothing kept of them.

    Raises:
        ConfigError: a setting asks for what an encoder does not do.
    """
    for name, neutral in _NEUTRAL.items():
        if (value := getattr(config, name)) != neutral:
            raise ConfigError(f"{name}={value!r} is not supported for an encoder ({model.architecture})")
    rows, _ = config.find_step_limits("cpu" if config.device == "cpu" else "cuda")
    length = config.max_model_len or model.max_model_len
    num_blocks = config.num_blocks or rows * -(-length // config.block_size) + 1
    return replace(config, enable_chunked_prefill=False, enable_prefix_caching=False, num_blocks=num_blocks)
