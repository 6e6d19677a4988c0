"""Worker: brings a model up on a device and runs its steps. Synchronous; one thread owns it.

load ─▶ (config resolved, cache allocated) ─▶ warm_up ─▶ execute / sample_gated ... ─▶ reset after a crash
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import torch

from engine.config import EngineConfig, ResolvedConfig, WorkerConfig, resolve_config
from engine.errors import ConfigError
from engine.messages import NewRow, SampleGate, StepDone, StepPlan
from engine.model import DecoderModel, ModelConfig, load_model
from engine.sampling_params import SamplingParams
from engine.worker.input_batch import InputBatch
from engine.worker.kv_cache import allocate_kv_cache, compute_bytes_per_block
from engine.worker.model_runner import ModelRunner
from engine.worker.sampling_state import SamplingState

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Worker:
    """One model on one device. After `load`, `resolved` and `model_config` tell what was made of the config."""

    def __init__(self, config: EngineConfig, eos_token_ids: tuple[int, ...]) -> None:
        self.config = config
        self.timeline: list[tuple[str, float]] = []  # (phase, seconds)
        self._eos_token_ids = eos_token_ids

    def load(self) -> None:
        """Read the checkpoint, size and allocate the KV cache, run one step.

        Raises:
            ConfigError: the device, dtype, checkpoint or memory does not allow what the config asks.
        """
        model_config = ModelConfig.from_pretrained(self.config.model)
        worker_config = self._choose_device(model_config)
        torch.set_num_threads(worker_config.num_threads)
        self.device = torch.device(worker_config.device)
        dtype = DTYPES[worker_config.dtype]
        start = time.monotonic()
        self.model: DecoderModel = load_model(
            self.config.model,
            dtype=dtype,
            device=self.device,
            load_format=self.config.load_format,
            config=model_config,
            seed=worker_config.seed,
        )
        self._note("weights", start)
        start = time.monotonic()
        bytes_per_block = compute_bytes_per_block(model_config, self.config.block_size, dtype)
        self.resolved: ResolvedConfig = resolve_config(
            self.config,
            worker_config,
            model_max_len=model_config.max_position_embeddings,
            free_bytes=self._measure_free_bytes(),
            bytes_per_block=bytes_per_block,
        )
        self.model_config = model_config
        cache = self.resolved.cache
        self.kv_caches = allocate_kv_cache(
            model_config, cache.num_blocks, cache.block_size, dtype, self.device
        )
        self.reset()
        self._note("kv cache", start)
        start = time.monotonic()
        self.warm_up()
        self._note("warm-up", start)

    def reset(self) -> None:
        """Forget all rows: an empty batch over the same weights and cache memory."""
        scheduler, cache = self.resolved.scheduler, self.resolved.cache
        batch = InputBatch(scheduler.max_num_seqs, scheduler.max_model_len, cache.block_size, self.device)
        state = SamplingState(scheduler.max_num_seqs, self.model_config.vocab_size, self.device)
        self.runner = ModelRunner(self.model, self.kv_caches, batch, state, self._eos_token_ids)

    def warm_up(self) -> None:
        """Run a prefill and a decode step in the null block, so that the first request does not pay for set-up."""
        prompt = np.zeros(2, dtype=np.int64)
        params = SamplingParams(max_tokens=2, temperature=0.7, top_p=0.9, seed=0)
        row = NewRow(0, prompt, 2, [0], params, 0, ())
        self.execute(_make_warm_up_plan(0, [row], start=0, count=2))
        self.execute(_make_warm_up_plan(1, [], start=2, count=1))
        self.reset()

    @property
    def has_parked(self) -> bool:
        return self.runner.has_parked

    def can_run(self, plan: StepPlan) -> bool:
        return self.runner.can_run(plan)

    def execute(self, plan: StepPlan) -> StepDone | None:
        return self.runner.execute(plan)

    def sample_gated(self, gate: SampleGate) -> StepDone | None:
        return self.runner.sample_gated(gate)

    def _note(self, phase: str, start: float) -> None:
        self.timeline.append((phase, time.monotonic() - start))

    def _choose_device(self, model_config: ModelConfig) -> WorkerConfig:
        config = self.config
        has_cuda = torch.cuda.is_available()
        device = ("cuda" if has_cuda else "cpu") if config.device == "auto" else config.device
        if device == "cuda" and not has_cuda:
            raise ConfigError("device='cuda': no CUDA device is visible to torch; use --device cpu, or auto")
        dtype: str = config.dtype
        if dtype == "auto":
            # float32 on CPU: the same seed gives the same text whatever the batch; bfloat16 rounds too coarsely.
            dtype = model_config.dtype if device == "cuda" else "float32"
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return WorkerConfig(
            model=config.model,
            load_format=config.load_format,
            dtype=dtype,
            device=device,
            num_threads=config.num_threads or max(1, cores - 1),
            seed=config.seed,
        )

    def _measure_free_bytes(self) -> int:
        """Bytes the KV cache may take: the configured share, and never more than is free now."""
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            share = self.config.memory_share or 0.9
            return max(0, min(int(total * share) - (total - free), free))
        total, free = _measure_host_memory()
        return min(int(total * (self.config.memory_share or 0.1)), int(free * 0.8))


def _make_warm_up_plan(step_id: int, new_rows: list[NewRow], start: int, count: int) -> StepPlan:
    return StepPlan(
        step_id=step_id,
        removed_rows=[],
        new_rows=new_rows,
        new_blocks=[],
        rows=np.zeros(1, dtype=np.int64),
        starts=np.array([start], dtype=np.int64),
        num_scheduled_tokens=np.array([count], dtype=np.int64),
        is_sampled=np.ones(1, dtype=bool),
        is_gated=np.zeros(1, dtype=bool),
    )


def _measure_host_memory() -> tuple[int, int]:
    """(total, available) bytes of RAM, within the container's limit where there is one."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * page
    free = os.sysconf("SC_AVPHYS_PAGES") * page
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        total = min(total, int(text))
        free = min(free, total)
    return total, free
