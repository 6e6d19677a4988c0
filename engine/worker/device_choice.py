"""Chooses device, dtype, attention backend and quantization for this machine.

probe_device ─▶ DeviceFacts ─▶ choose_worker_config ─▶ WorkerConfig without any "auto", and notices for the log
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.model import ModelConfig
from engine.model.implementation import TransformersConfig
from engine.model.weight_memory import count_parameters
from engine.resolved_config import WorkerConfig
from kernels.cpu import NativeBuild, count_cores
from kernels.cpu.build import read_cpu_flags
from kernels.ops import PIECE_SLOTS
from kernels.triton_support import MIN_CAPABILITY, find_triton_gap

logger = logging.getLogger("troupe.worker")

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
# Minimum compute capability of NVIDIA GPUs.
_WITH_BFLOAT16 = (8, 0)
_WITH_FP8 = (8, 9)
# On CPU, bfloat16 waits for the native ops; a smaller model is loaded long before a compiler has finished.
_MIN_PARAMETERS = 100_000_000
# Settings with the one value that each may have on MPS.
_ON_MPS = {
    "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "quantization": "none", "kv_cache_dtype": "auto",
    "kv_offload_gb": 0.0, "kv_transfer_config": None,
}


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Properties of a device that the choices depend on."""

    kind: str  # cpu, cuda or mps
    capability: tuple[int, int] = (0, 0)  # compute capability of a CUDA device
    triton_gap: str = ""  # why triton cannot be used; empty if it can
    num_cores: int = 1
    # Why native ops cannot compute in bfloat16 at full speed; empty if they can, or on CUDA
    bfloat16_gap: str = ""
    idle_gpu: str = ""  # why this machine's GPU cannot be used; empty if it can, or there is none


def probe_device(device: str) -> DeviceFacts:
    """Return the properties of the configured device."""
    has_cuda = torch.cuda.is_available()
    kind = ("cuda" if has_cuda else "cpu") if device == "auto" else device
    if kind == "cuda" and not has_cuda:
        raise ConfigError("device='cuda': no CUDA device is visible to torch; use --device cpu, or auto")
    if kind == "mps" and not torch.backends.mps.is_available():
        why = "no GPU that Metal can use" if torch.backends.mps.is_built() else "no MPS in it"
        raise ConfigError(
            f"device='mps': torch {torch.__version__} has {why}; it needs macOS on Apple silicon and torch's build for "
            "it; use --device cpu, or auto"
        )
    capability = torch.cuda.get_device_capability() if kind == "cuda" else (0, 0)
    idle_gpu = "" if has_cuda or device == "cpu" else _explain_idle_gpu(NVIDIA_DRIVER)
    bfloat16_gap = _find_bfloat16_gap() if kind == "cpu" else ""
    return DeviceFacts(kind, capability, find_triton_gap(), count_cores(), bfloat16_gap, idle_gpu)


def _find_bfloat16_gap() -> str:
    if "avx512_bf16" not in read_cpu_flags():
        # Native ops would widen it to float32: as slow, and less exact.
        return "this processor has no bfloat16 products (avx512_bf16)"
    gap = NativeBuild().find_gap()
    return gap and f"no native ops: {gap}"


def _explain_idle_gpu(driver: Path) -> str:
    """Return a sentence about an NVIDIA driver that torch cannot use; empty if no driver is loaded."""
    if not driver.exists():
        return ""
    found = re.search(r"Kernel Module[^\d]*(\d[\d.]*)", driver.read_text(errors="replace"))
    name = f"driver {found[1]}" if found else "its driver"
    built = (
        f"was built for CUDA {torch.version.cuda}" if torch.version.cuda else "is a build for the CPU alone"
    )
    return (
        f"this machine has an NVIDIA GPU ({name}), but torch {torch.__version__} {built} and cannot use it: running "
        "on the CPU; install a newer driver, or the torch build that fits this one"
    )


def choose_worker_config(
    config: EngineConfig, model_config: ModelConfig, facts: DeviceFacts
) -> tuple[WorkerConfig, list[str]]:
    """Replace every "auto" that depends on the device.

    Returns the worker's config, and notices for the log about unexpected choices.

    Raises:
        ConfigError: the device does not support a setting; the message names an alternative.
    """
    notices: list[str] = [facts.idle_gpu] if facts.idle_gpu else []
    if facts.kind == "mps":
        _check_mps(config)
    dtype = _choose_dtype(config, model_config, facts, notices)
    backend = _choose_backend(config, facts, notices)
    _check_quantization(config, dtype, backend, facts)
    _check_cache_dtype(config, facts)
    is_cpu, is_auto = facts.kind == "cpu", config.attention_backend == "auto"
    worker = WorkerConfig(
        model=config.model,
        load_format=config.load_format,
        dtype=dtype,
        device=facts.kind,
        num_threads=_count_threads(config, facts),
        seed=config.seed,
        attention_backend=backend,
        quantization=config.quantization,
        kv_cache_dtype=config.kv_cache_dtype,
        enable_native_ops=is_cpu and config.enable_native_ops and is_auto,
        enable_cuda_graphs=not is_cpu and config.enable_cuda_graphs and backend == "triton",
    )
    return worker, notices


def _count_threads(config: EngineConfig, facts: DeviceFacts) -> int:
    """Return the number of threads of each rank. One rank leaves a core to the event loop."""
    if config.num_ranks > 1:
        return max(1, (config.num_threads or facts.num_cores) // config.ranks_per_node)
    return config.num_threads or max(1, facts.num_cores - 1)


def _choose_dtype(
    config: EngineConfig, model_config: ModelConfig, facts: DeviceFacts, notices: list[str]
) -> str:
    has_bfloat16 = facts.kind != "cuda" or facts.capability >= _WITH_BFLOAT16
    if config.dtype == "bfloat16" and not has_bfloat16:
        raise ConfigError(
            f"dtype='bfloat16': this GPU (compute capability {_capability(facts)}) has none; use float16, or auto"
        )
    if config.dtype != "auto":
        return config.dtype
    if facts.kind == "cpu":
        why = _explain_float32(config, model_config, facts)
        dtype = "float32" if why else "bfloat16"
        logger.info("dtype %s: %s", dtype, why or "that of the checkpoint, and native ops compute in it")
        return dtype
    if model_config.dtype == "bfloat16" and not has_bfloat16:
        notices.append("float16 instead of the checkpoint's bfloat16, which this GPU does not support")
        return "float16"
    return model_config.dtype


def _explain_float32(config: EngineConfig, model_config: ModelConfig, facts: DeviceFacts) -> str:
    """Return why a model runs in float32 on the CPU; empty if bfloat16 is better.

    In bfloat16, native ops give the same text for the same seed in every batch; torch's ops do not.
    """
    if model_config.dtype != "bfloat16":
        return f"the checkpoint is in {model_config.dtype}"
    if not config.enable_native_ops or config.attention_backend == "sdpa":
        return "native ops are off"
    has_other_layers = isinstance(model_config, TransformersConfig) or any(
        spec.state is not None for spec in model_config.layer_specs
    )
    if has_other_layers or model_config.weight_format is not None:
        return "native ops do not run all of its layers, or its weights are quantized"
    if count_parameters(model_config) < _MIN_PARAMETERS:
        return f"a model of fewer than {_MIN_PARAMETERS:,} parameters starts before the native ops are built"
    return facts.bfloat16_gap


def _choose_backend(config: EngineConfig, facts: DeviceFacts, notices: list[str]) -> str:
    asked, is_cpu = config.attention_backend, facts.kind == "cpu"
    if asked == "triton":
        if facts.kind != "cuda":
            raise ConfigError("attention_backend='triton' needs a CUDA device; use auto, native or sdpa")
        if facts.triton_gap:
            raise ConfigError(f"attention_backend='triton': {facts.triton_gap}; install it, or use sdpa")
        if facts.capability < MIN_CAPABILITY:
            raise ConfigError(
                f"attention_backend='triton': this GPU (compute capability {_capability(facts)}) is older than 8.0; "
                "use sdpa"
            )
    if asked == "native":
        if not is_cpu:
            raise ConfigError("attention_backend='native' runs on the CPU only; use auto, triton or sdpa")
        if not config.enable_native_ops:
            raise ConfigError("attention_backend='native' contradicts enable_native_ops=False")
    if asked != "auto":
        return asked
    if facts.kind != "cuda":
        return "sdpa"
    if not facts.triton_gap and facts.capability >= MIN_CAPABILITY:
        return "triton"
    why = facts.triton_gap or "this GPU is older than compute capability 8.0"
    notices.append(f"attention_backend sdpa, because {why}; CUDA graphs are disabled")
    return "sdpa"


def _check_mps(config: EngineConfig) -> None:
    """Refuse what torch's ops do not do on the GPU of a Mac, or what its shared memory makes useless."""
    for name, neutral in _ON_MPS.items():
        if (value := getattr(config, name)) != neutral:
            raise ConfigError(f"{name}={value!r} does not work with device='mps'; use {neutral!r}, or --device cpu")
    speculative = config.read_speculative()
    if speculative is not None and speculative.device_method is not None:
        raise ConfigError(
            f"speculative_config: method={speculative.device_method!r} does not work with device='mps'; use ngram or "
            "suffix, or --device cpu"
        )


def _check_cache_dtype(config: EngineConfig, facts: DeviceFacts) -> None:
    if config.kv_cache_dtype == "fp8" and facts.kind != "cuda":
        raise ConfigError("kv_cache_dtype='fp8' needs a CUDA device, this engine runs on the CPU; use int8")
    if config.kv_cache_dtype == "int8" and facts.kind == "cuda":
        raise ConfigError("kv_cache_dtype='int8' is for the CPU, this engine runs on CUDA; use fp8")
    if config.kv_cache_dtype == "int8" and config.block_size % PIECE_SLOTS:
        raise ConfigError(
            f"block_size={config.block_size} must be a multiple of {PIECE_SLOTS} with kv_cache_dtype='int8'"
        )


def _check_quantization(config: EngineConfig, dtype: str, backend: str, facts: DeviceFacts) -> None:
    name = config.quantization
    is_cpu = facts.kind == "cpu"
    if name in ("none", "int8") or (name == "int4" and (is_cpu or backend == "triton")):
        return
    if is_cpu:
        raise ConfigError(
            f"quantization={name!r} needs a CUDA device, this engine runs on the CPU; use int8 or int4"
        )
    if name == "int4":
        raise ConfigError(f"quantization='int4' needs Triton's kernels on a GPU, not {backend}; use int8")
    if facts.capability < _WITH_FP8:
        raise ConfigError(
            f"quantization={name!r} needs compute capability {_WITH_FP8[0]}.{_WITH_FP8[1]}, this GPU has "
            f"{_capability(facts)}; use int8"
        )
    if dtype != "bfloat16":
        raise ConfigError(f"quantization={name!r} needs dtype bfloat16, not {dtype}")


def _capability(facts: DeviceFacts) -> str:
    return f"{facts.capability[0]}.{facts.capability[1]}"
