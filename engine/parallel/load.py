"""Loads one rank's part of a model."""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.config import EngineConfig
from engine.device.kv_cache import DTYPES
from engine.device.ops_choice import start_ops
from engine.model import ModelConfig, load_model
from engine.model.decoder import DecoderModel
from engine.model.sharding import Sharding
from engine.resolved_config import WorkerConfig
from kernels import Ops


def load_shard(
    config: EngineConfig, worker: WorkerConfig, model_config: ModelConfig, device: torch.device,
    sharding: Sharding,
) -> DecoderModel:
    """Load the part of a rank that follows."""
    ops, _ = start_ops(worker, DTYPES[worker.dtype], worker.num_threads, waits=True, heads=model_config.head_shapes)
    model = load_model(
        config.model, dtype=DTYPES[worker.dtype], device=device, load_format=config.load_format,
        config=model_config, seed=worker.seed, ops=limit_ops(ops),
        quantization=None if worker.quantization == "none" else worker.quantization, sharding=sharding,
    )
    assert isinstance(model, DecoderModel)
    return model


def limit_ops(ops: Ops) -> Ops:
    """Return ops without those that know nothing of ranks: whole layers, drawing from the head, recorded steps."""
    return replace(ops, make_tape=None, is_graph_safe=False)
