"""Creates the ops selected by a worker's config."""

from __future__ import annotations

import importlib

import torch

from engine.config import WorkerConfig
from engine.errors import ConfigError
from engine.worker.native_swap import NativeSwap
from kernels import Ops, torch_ops
from kernels.compiled_ops import compile_ops


def make_ops(config: WorkerConfig, dtype: torch.dtype, num_threads: int | None) -> Ops:
    """Return the ops that the model uses from its first step on.

    Args:
        num_threads: as set by the user; None: native ops use all cores.

    Raises:
        ConfigError: the implementation is not available, or does not support the device or dtype.
    """
    device = torch.device(config.device)
    match config.attention_backend:
        case "triton":
            ops = _make_triton_ops(device, dtype)
        case "native":
            ops = _make_native_ops(dtype, num_threads)
        case backend:
            ops = torch_ops.make_ops("flex" if backend == "flex" else "sdpa", device)
            if config.compile:
                ops = compile_ops(ops)
    if config.kv_cache_dtype == "fp8" and not ops.takes_fp8_cache:
        raise ConfigError(f"kv_cache_dtype='fp8' is not supported by the {ops.name} ops; use auto, or sdpa")
    return ops


def _make_triton_ops(device: torch.device, dtype: torch.dtype) -> Ops:
    try:
        # Imported by name, because triton is needed on CUDA only and may not be installed.
        ops = importlib.import_module("kernels.triton").make_ops(device, dtype)
    except ImportError as error:
        raise ConfigError(f"attention_backend='triton': {error}; use sdpa") from error
    assert isinstance(ops, Ops), "kernels.triton makes Ops"
    return ops


def _make_native_ops(dtype: torch.dtype, num_threads: int | None) -> Ops:
    swap = NativeSwap(dtype, num_threads)
    ops = swap.start(waits=True)
    if ops is None:
        raise ConfigError(f"attention_backend='native': native ops are {swap.status}; use auto, or sdpa")
    return ops
