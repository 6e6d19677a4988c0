"""Worker: loads a model on a device and runs its steps. Synchronous; one thread owns it.

load ─▶ (config resolved, cache allocated) ─▶ warm_up ─▶ execute, sample ... ─▶ reset after a crash
                                                          ├ chores between steps: recording decode graphs,
                                                          │ repacking weights for the native ops
                                                          └ sleep ─▶ wake
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import IntEnum

import torch

from engine.config import EngineConfig, ResolvedConfig
from engine.core.block_hash import compute_fingerprint
from engine.host_memory import measure_host_memory
from engine.messages import StepDone, StepMasks, StepPlan
from engine.model import Model, ModelConfig, load_model
from engine.worker.cache_sizer import CacheSizer
from engine.worker.cuda_link import CudaGraphRecorder
from engine.worker.decode_graphs import DecodeGraphs
from engine.worker.device import DeviceMemory, open_device
from engine.worker.device_choice import choose_worker_config, probe_device
from engine.worker.device_link import PendingStep
from engine.worker.executor import Loaded
from engine.worker.input_batch import InputBatch
from engine.worker.kv_cache import DTYPES, allocate_kv_cache, choose_kv_dtype
from engine.worker.model_runner import ModelRunner
from engine.worker.native_swap import NativeSwap
from engine.worker.ops_choice import note_rounding, start_ops
from engine.worker.sampling.state import SamplingState
from engine.worker.warm_up import list_largest_steps, list_warm_up, record_first, run_steps
from engine.worker.weight_moves import list_tensors, move_tensors

# Under constant load, one chore runs after this many steps. Recording a graph waits for the device; repacking one
# matrix takes less time than a step.
STEPS_PER_RECORDING, STEPS_PER_MOVE = 64, 4


class WorkerState(IntEnum):
    """The memory that a worker holds; values of 1 and 2 are sleep levels."""

    NEW = -1  # nothing yet
    READY = 0  # weights, cache and rows
    ASLEEP_1 = 1  # weights, on the host
    ASLEEP_2 = 2  # nothing; `wake` reads the weights again


class Worker:
    """The executor of one model on one device."""

    def __init__(self, config: EngineConfig, eos_token_ids: tuple[int, ...]) -> None:
        self.config = config
        self.state = WorkerState.NEW
        self.device = torch.device("cpu")  # until the config is resolved
        self.kv_caches: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._timeline: list[tuple[str, float]] = []  # (phase, seconds)
        self._eos_token_ids = eos_token_ids
        self._memory: DeviceMemory | None = None  # None on the CPU
        self._model: Model | None = None
        self._native: NativeSwap | None = None
        self._graphs: DecodeGraphs | None = None
        self._runner: ModelRunner | None = None
        self._num_steps = 0

    @property
    def model(self) -> Model:
        assert self._model is not None, "no model is loaded"
        return self._model

    @property
    def runner(self) -> ModelRunner:
        assert self._runner is not None, "the worker is not ready"
        return self._runner

    def load(self) -> Loaded:
        """Read the checkpoint, size and allocate the KV cache, and warm up."""
        self.model_config = ModelConfig.from_pretrained(self.config.model)
        facts = probe_device(self.config.device)
        self._worker_config, notices = choose_worker_config(self.config, self.model_config, facts)
        torch.set_num_threads(self._worker_config.num_threads)
        self.device, self._link, self._memory = open_device(self._worker_config)
        with self._phase("weights"):
            self._load_model()
        notices += note_rounding(self._worker_config, self.model.ops.name, self._native)
        with self._phase("kv cache"):
            resolved = self._size_cache()
            notices = [*notices, *resolved.notices]
            self.resolved = replace(
                resolved, notices=tuple(notices), fingerprint=self._compute_fingerprint(resolved)
            )
            self._make_caches()
            self.reset()
        with self._phase("warm-up"):
            self.warm_up()
        self.state = WorkerState.READY
        return Loaded(self.resolved, self.model_config, tuple(self._timeline))

    def reset(self) -> None:
        """Start with an empty batch on the same weights, cache memory and recorded graphs."""
        self._link.enter_thread()
        self._runner = None  # frees its token pool before the next one is allocated
        scheduler, cache = self.resolved.scheduler, self.resolved.cache
        batch = InputBatch(scheduler.max_num_seqs, scheduler.max_model_len, cache.block_size, self.device)
        state = SamplingState(scheduler.max_num_seqs, self.model_config.vocab_size, self.device)
        self._runner = ModelRunner(
            self.model, self.kv_caches, batch, state, self._eos_token_ids, self._link, self._graphs
        )

    def sleep(self, level: int) -> None:
        """Free the memory that this level does not hold, see WorkerState."""
        self.state = WorkerState(level)
        self._free_memory()

    def wake(self) -> None:
        """Load and allocate again what `sleep` freed. After an error the worker is asleep as before."""
        self._link.enter_thread()
        try:
            if self.state is WorkerState.ASLEEP_2:
                self._load_model()
            elif self.device.type != "cpu":
                move_tensors(list_tensors(self.model), self.device)
            self._make_caches()
            self.reset()
        except BaseException:
            self._free_memory()
            raise
        self.state = WorkerState.READY

    @property
    def sleep_level(self) -> int:
        return max(0, self.state)

    def close(self, *, frees_memory: bool = True) -> None:
        """End; see Executor.close."""
        if frees_memory:
            self.sleep(WorkerState.ASLEEP_2)

    def _free_memory(self) -> None:
        if self.state is WorkerState.ASLEEP_2:
            self._model = self._native = None
        self._drop_cache()
        if self.state is WorkerState.ASLEEP_1 and self.device.type != "cpu":
            move_tensors(list_tensors(self.model), torch.device("cpu"))
        if self._memory is not None:
            self._memory.empty_cache()

    def _drop_cache(self) -> None:
        """Drop everything whose size depends on the cache or the rows."""
        self._runner = self._graphs = None
        self.kv_caches = []
        if self._model is not None:
            self._model.release_positions()

    def warm_up(self) -> None:
        """Run steps in the null block and record graphs, so that the first requests are not delayed by compilation."""
        max_len, is_gpu = self.resolved.scheduler.max_model_len, self.device.type == "cuda"
        run_steps(self.runner, list_warm_up(max_len, self.model_config.vocab_size, is_thorough=is_gpu))
        self.reset()
        record_first(self._graphs)

    def get_mask_timeout(self, plan: StepPlan) -> float:
        return self.runner.get_mask_timeout(plan)

    def execute(self, plan: StepPlan) -> StepDone | PendingStep | None:
        answer = self.runner.execute(plan)
        self._num_steps += 1
        if self._num_steps % (STEPS_PER_MOVE if self._graphs is None else STEPS_PER_RECORDING) == 0:
            self.do_chore()
        return answer

    def sample(self, masks: StepMasks) -> StepDone | PendingStep | None:
        return self.runner.sample_gated(masks)

    def do_chore(self) -> bool:
        """Record the graph of one more batch size, or repack one more matrix; see Executor.do_chore."""
        if self._graphs is not None and self._graphs.has_more:
            self._graphs.record_next()
        elif self._native is not None and self._native.has_move:
            self._native.move_next(self.model)
        else:
            return False
        return True

    def describe(self) -> dict[str, str | int]:
        if self.sleep_level:
            return {"ops": "asleep", "sleep_level": self.sleep_level}
        found: dict[str, str | int] = {"ops": self.model.ops.name}
        if self._native is not None:
            found["native_ops"] = self._native.status
        if self._graphs is not None:
            found["num_recorded_graphs"] = self._graphs.num_recorded
            found["num_graphs_left"] = self._graphs.num_left
        return found

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self._timeline.append((name, time.monotonic() - start))

    def _load_model(self) -> None:
        config = self._worker_config
        dtype = DTYPES[config.dtype]
        ops, self._native = start_ops(config, dtype, self.config.num_threads)
        self._model = load_model(
            self.config.model,
            dtype=dtype,
            device=self.device,
            load_format=self.config.load_format,
            config=self.model_config,
            seed=config.seed,
            ops=ops,
            quantization=None if config.quantization == "none" else config.quantization,
        )

    def _size_cache(self) -> ResolvedConfig:
        sizer = CacheSizer(self.config, self._worker_config, self.model_config, self.model.kv_specs())
        if self._memory is not None:
            return sizer.measure(self._memory, self._run_largest_steps)
        return sizer.estimate(self.model.ops, self._native)

    def _compute_fingerprint(self, resolved: ResolvedConfig) -> str:
        config = self._worker_config
        return compute_fingerprint(
            self.model.weights_hash, repr(self.model_config), config.dtype, config.quantization,
            str(choose_kv_dtype(config)), resolved.cache,
        )  # fmt: skip

    def _run_largest_steps(self, resolved: ResolvedConfig) -> None:
        """Run the largest steps and the first recordings on a cache of one block, then free their memory."""
        self.resolved = replace(resolved, cache=replace(resolved.cache, num_blocks=1))
        try:
            self._make_caches()
            self.reset()
            record_first(self._graphs)
            num_tokens = resolved.cache.num_blocks * resolved.cache.block_size
            steps = list_largest_steps(resolved.scheduler, num_tokens, self.model_config.vocab_size)
            run_steps(self.runner, steps)
        finally:
            self._drop_cache()

    def _make_caches(self) -> None:
        cache = self.resolved.cache
        self.kv_caches = allocate_kv_cache(
            self.model.kv_specs(),
            cache.num_blocks,
            cache.block_size,
            choose_kv_dtype(self._worker_config),
            self.device,
            free_bytes=measure_host_memory()[1] if self.device.type == "cpu" else None,
        )
        self.model.limit_positions(self.resolved.max_model_len)
        if self.device.type == "cuda":
            # Recorded graphs contain the tables' addresses, so the tables must not be reallocated later.
            self.model.reserve_positions(self.resolved.max_model_len)
        self._graphs = self._make_graphs()

    def _make_graphs(self) -> DecodeGraphs | None:
        """Return decode graphs if the config enables them and the model allows it."""
        # Dynamic RoPE depends on sequence lengths, which a recorded graph would fix.
        is_static = self.model.ops.is_graph_safe and self.model_config.rope.rope_type != "dynamic"
        if not self.resolved.worker.enable_cuda_graphs or not is_static:
            return None
        scheduler = self.resolved.scheduler
        return DecodeGraphs(
            self.model, self.kv_caches, scheduler.max_num_seqs, scheduler.max_model_len, CudaGraphRecorder()
        )
