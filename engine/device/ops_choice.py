"""Creates the ops selected by a worker's config."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import torch

from engine.device.kv_cache import CACHE_DTYPES
from engine.device.native_swap import NativeSwap
from engine.errors import ConfigError
from engine.resolved_config import WorkerConfig
from kernels import Ops
from kernels import torch as torch_ops
from kernels.torch.elementwise import FP8

HeadShape = tuple[int, int, int]


def start_ops(
    config: WorkerConfig, dtype: torch.dtype, num_threads: int | None, has_codes: bool = False,
    waits: bool = False, heads: Sequence[HeadShape] = (),
) -> tuple[Ops, NativeSwap | None]:
    """Return what the model calls from its first step on, and what moves it to native ops later.

    Args:
        num_threads: as set by the user; None: native ops use all cores.
        has_codes: the checkpoint has 4-bit codes, with which only native ops multiply.
        waits: wait for the native ops, because the ops must not change later.
        heads: number of heads, of key heads, and the size of a head, of each kind of layer, for the check of Triton.
    """
    if not config.enable_native_ops:
        return make_ops(config, dtype, num_threads, heads), None
    native = NativeSwap(dtype, num_threads)
    # With quantized weights the ops must not change later: a difference in the last bit may change a token.
    is_coarse = config.quantization != "none" or config.dtype == "bfloat16" or has_codes
    ops = native.start(waits=waits or is_coarse or config.kv_cache_dtype == "int8")
    if ops is None and config.kv_cache_dtype == "int8":
        raise ConfigError(f"kv_cache_dtype='int8' needs the native ops, which are {native.status}; use auto")
    return ops or make_ops(config, dtype, num_threads, heads), native


def note_rounding(
    config: WorkerConfig, ops_name: str, native: NativeSwap | None, has_states: bool = False
) -> list[str]:
    """Explain what is lost without the native ops: torch's sums depend on the batch in their last bits.

    Args:
        has_states: whether layers have states, which torch's ops compute in chunks.
    """
    if has_states and ops_name != "native":
        return [
            f"layers with states on {ops_name}: the same seed need not give the same text with other chunks of a prompt"
        ]
    is_quantized = config.quantization != "none"
    is_coarse = is_quantized or config.dtype != "float32"
    if config.device != "cpu" or not is_coarse or ops_name == "native":
        return []
    what = f"quantization={config.quantization!r}" if is_quantized else f"dtype={config.dtype!r}"
    why = "off" if native is None else native.status
    return [
        f"{what} on {ops_name} (native ops: {why}): the same seed need not give the same text in another batch"
    ]


def make_ops(
    config: WorkerConfig, dtype: torch.dtype, num_threads: int | None, heads: Sequence[HeadShape] = ()
) -> Ops:
    """Return the ops that the config names, without a change later on."""
    device = torch.device(config.device)
    match config.attention_backend:
        case "triton":
            ops = _make_triton_ops(device, dtype, FP8 if config.kv_cache_dtype == "fp8" else dtype, heads)
        case "native":
            ops = _make_native_ops(dtype, num_threads)
        case _:
            ops = torch_ops.make_ops(device)
    name = config.kv_cache_dtype
    if name != "auto" and CACHE_DTYPES[name] not in ops.cache_dtypes:
        raise ConfigError(f"kv_cache_dtype={name!r} is not supported by the {ops.name} ops; use auto")
    return ops


def _make_triton_ops(
    device: torch.device, dtype: torch.dtype, cache_dtype: torch.dtype, heads: Sequence[HeadShape]
) -> Ops:
    try:
        # Imported by name, because triton is needed on CUDA only and may not be installed.
        ops = importlib.import_module("kernels.triton").make_ops(device, dtype)
        check = importlib.import_module("kernels.triton.self_check")
    except ImportError as error:
        raise ConfigError(f"attention_backend='triton': {error}; use sdpa") from error
    checked: Ops = check.check_ops(ops, device, dtype, cache_dtype, heads)
    return checked


def _make_native_ops(dtype: torch.dtype, num_threads: int | None) -> Ops:
    swap = NativeSwap(dtype, num_threads)
    ops = swap.start(waits=True)
    if ops is None:
        raise ConfigError(f"attention_backend='native': native ops are {swap.status}; use auto, or sdpa")
    return ops
