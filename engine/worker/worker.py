"""Worker: loads a model on a device and runs its steps. Synchronous; one thread owns it.

load ─▶ (config resolved, cache allocated) ─▶ warm_up ─▶ execute, sample ... ─▶ reset after a crash
                                                          ├ chores between steps: recording decode graphs,
                                                          │ repacking weights for the native ops
                                                          └ sleep ─▶ wake
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import IntEnum

import numpy as np
import torch

from engine.config import EngineConfig
from engine.core.actor_messages import StepDone, StepMasks, StepPlan
from engine.core.block_hash import compute_fingerprint
from engine.device.cuda_link import CudaGraphRecorder
from engine.device.device_link import PendingStep
from engine.device.device_memory import DeviceMemory, open_device
from engine.device.kv_cache import allocate_kv_cache, choose_kv_dtype
from engine.device.ops_choice import note_rounding
from engine.device.slot_copier import HeadPart, SlotCopier
from engine.host_memory import measure_host_memory, return_freed_memory
from engine.kv_cache_spec import KVCacheSpec
from engine.kv_transfer_config import UNIT_TOKENS, count_units
from engine.model import Model, read_model_config
from engine.model.adapters import AdapterTables
from engine.model.implementation import EncoderConfig, TransformersConfig
from engine.model.vision.encoder import ImageEncoder
from engine.parallel.leader import LeaderDecoder
from engine.resolved_config import ResolvedConfig
from engine.spec.device.mtp import choose_mtp
from engine.transfer.host_store import HostStore
from engine.worker.adapter_rows import AdapterRows
from engine.worker.adapter_store import AdapterStore
from engine.worker.cache_sizer import CacheSizer
from engine.worker.decode_graphs import DecodeGraphs
from engine.worker.device_choice import choose_worker_config, probe_device
from engine.worker.encoder_rows import EncoderRows, adapt_config
from engine.worker.executor import Loaded
from engine.worker.image_rows import ImageRows
from engine.worker.input_batch import InputBatch
from engine.worker.launched_step import RowPart
from engine.worker.loaded_model import LoadedModel
from engine.worker.model_runner import ModelRunner
from engine.worker.sampling.state import SamplingState
from engine.worker.state_slots import StateSlots, allocate_states, check_states
from engine.worker.warm_up import (
    list_largest_steps,
    list_measured_steps,
    list_warm_up,
    record_first,
    run_steps,
    run_timed,
)

# Under constant load, one chore runs after this many steps. Recording a graph waits for the device; repacking one
# matrix takes less time than a step.
STEPS_PER_RECORDING, STEPS_PER_MOVE = 64, 4
# Drafts of a row in a recorded step; attention treats a longer run as a prompt.
MAX_RECORDED_DRAFTS = 15
# Approximate seconds for which steps are measured at the start.
MEASURE_S = 1.0


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
        self._loaded: LoadedModel | None = None
        self._graphs: DecodeGraphs | None = None
        self._adapter_tables: AdapterTables | None = None
        self._runner: ModelRunner | None = None
        self._state_caches: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._draft_caches: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._host_store: HostStore | None = None  # blocks that left the KV cache
        self._num_steps = 0
        self.before_layers: Callable[[], None] = lambda: None
        self.take_masks: Callable[[int, np.ndarray], StepMasks | None] = lambda step_id, indices: None

    @property
    def model(self) -> Model:
        return self.loaded.model

    @property
    def loaded(self) -> LoadedModel:
        assert self._loaded is not None, "no model is loaded"
        return self._loaded

    @property
    def adapters(self) -> AdapterStore | None:
        return None if self._loaded is None else self._loaded.adapters

    @property
    def encoder(self) -> ImageEncoder | None:
        return None if self._loaded is None else self._loaded.encoder

    @property
    def host_memory(self) -> HostStore | None:
        return self._host_store

    @property
    def runner(self) -> ModelRunner:
        assert self._runner is not None, "the worker is not ready"
        return self._runner

    def load(self) -> Loaded:
        """Read the checkpoint, size and allocate the KV cache, and warm up."""
        self.model_config = read_model_config(
            self.config.model, self.config.model_impl, self.config.read_hf_overrides()
        )
        if isinstance(self.model_config, EncoderConfig):
            self.config = adapt_config(self.config, self.model_config)
        check_states(self.config, self.model_config)
        facts = probe_device(self.config.device)
        self._worker_config, notices = choose_worker_config(self.config, self.model_config, facts)
        self.config = choose_mtp(self.config, self.model_config, self._worker_config.device)
        if isinstance(self.model_config, TransformersConfig):
            notices += self.model_config.notices
        torch.set_num_threads(self._worker_config.num_threads)
        self.device, self._link, self._memory = open_device(self._worker_config)
        with self._phase("weights"):
            self._load_model()
        notices += note_rounding(
            *(self._worker_config, self.model.ops.name, self.loaded.native),
            has_states=any(self.model_config.layer_states),
        )
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
        step_times = () if self.resolved.speculative is None else self._measure_steps()
        self.state = WorkerState.READY
        return Loaded(self.resolved, self.model_config, tuple(self._timeline), step_times)

    def reset(self) -> None:
        """Start with an empty batch on the same weights, cache memory and recorded graphs."""
        if self._link is not None:
            self._link.enter_thread()
        if self._loaded is not None and self._loaded.ranks is not None:
            self._loaded.ranks.drain()
        if self._loaded is None or self._loaded.is_broken:
            self._drop_cache()
            self._load_model()
            self._make_caches()
        adapters, drafter = self.loaded.adapters, self.loaded.drafter
        self._runner = None  # frees its token pool before the next one is allocated
        if adapters is not None:
            adapters.unpin_all()
        scheduler, cache = self.resolved.scheduler, self.resolved.cache
        batch = InputBatch(
            *(scheduler.max_num_seqs, scheduler.max_model_len, cache.block_size, self.device),
            num_groups=len(cache.groups),
            gather=self.model.ops.gather_inputs,
        )
        # MPS has no float64, which the sums of top-p are compared in, and the host shares its memory.
        place = torch.device("cpu") if self.device.type == "mps" else self.device
        state = SamplingState(scheduler.max_num_seqs, self.model_config.vocab_size, place)
        states = StateSlots(self._state_caches, scheduler.max_num_seqs) if self._state_caches else None
        parts: list[RowPart] = [] if states is None else [states]
        if adapters is not None:
            parts.append(AdapterRows(adapters, self.model, self.device, self._adapter_tables))
        if self.encoder is not None:
            parts.append(ImageRows(self.model.dtype, self.device, bool(self.model_config.rope.axes)))
        if isinstance(self.model_config, EncoderConfig):
            parts.append(EncoderRows(self.device))
        self._runner = ModelRunner(
            self.model, [*self.kv_caches, *self._state_caches], batch, state, self._eos_token_ids, self._link,
            self._graphs, drafter, parts, states, None if self._graphs is None else self._graphs.buffers,
        )
        self.model.before_layers, self._runner.take_masks = self.before_layers, self.take_masks
        if drafter is not None:
            drafter.start(batch, self._runner.sampler, self._draft_caches)

    def sleep(self, level: int) -> None:
        """Free the memory that this level does not hold, see WorkerState."""
        self.state = WorkerState(level)
        self._free_memory()
        return_freed_memory()

    def wake(self) -> None:
        """Load and allocate again what `sleep` freed. After an error the worker is asleep as before."""
        if self._link is not None:
            self._link.enter_thread()
        try:
            if self._loaded is None or self._loaded.is_broken:
                self._load_model()
            else:
                self.loaded.move_weights(self.device)
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
        if frees_memory:
            self.sleep(WorkerState.ASLEEP_2)

    def _free_memory(self) -> None:
        if self.state is WorkerState.ASLEEP_2:
            self._close_model()
        self._drop_cache()
        if self.state is WorkerState.ASLEEP_1:
            self.loaded.move_weights(torch.device("cpu"))
        if self._memory is not None:
            self._memory.empty_cache()

    def _drop_cache(self) -> None:
        """Drop everything whose size depends on the cache or the rows."""
        self._runner = self._graphs = self._adapter_tables = None
        self.kv_caches, self._state_caches, self._draft_caches = [], [], []
        if self._host_store is not None:
            self._host_store.detach()
        if self._loaded is not None:
            self._loaded.model.release_positions()
            if self._loaded.ranks is not None:
                self._loaded.ranks.free(max(0, self.state))

    def warm_up(self) -> None:
        """Run steps in the null block and record graphs, so that the first requests are not delayed by compilation."""
        max_len, is_gpu = self.resolved.scheduler.max_model_len, self.device.type == "cuda"
        run_steps(self.runner, list_warm_up(max_len, self.model_config.vocab_size, is_thorough=is_gpu))
        self.reset()
        record_first(self._graphs)

    def get_mask_timeout(self, plan: StepPlan) -> float:
        assert self._runner is not None, "the worker is ready"
        return self._runner.get_mask_timeout(plan) if self._runner.parked_rows else 0.0

    def execute(self, plan: StepPlan) -> StepDone | PendingStep | None:
        if plan.block_moves:
            assert self._host_store is not None, "the core moves blocks if there is a store"
            self._host_store.move(plan.block_moves)
        assert self._runner is not None, "the worker is ready"
        answer = self._runner.execute(plan)
        if plan.block_saves:
            assert self._host_store is not None, "the core saves blocks if there is a store"
            self._host_store.move(plan.block_saves)
        self._num_steps += 1
        if self._num_steps % (STEPS_PER_MOVE if self._graphs is None else STEPS_PER_RECORDING) == 0:
            self.do_chore()
        return answer

    def sample(self, masks: StepMasks) -> StepDone | PendingStep | None:
        return self.runner.sample_gated(masks)

    def do_chore(self) -> bool:
        """Record the graph of one more batch size, or repack one more matrix; see Executor.do_chore."""
        loaded = self._loaded
        assert loaded is not None, "the worker is ready"
        if loaded.ranks is not None:
            loaded.ranks.check()
        if self._graphs is not None and self._graphs.has_more:
            self._graphs.record_next()
            return True
        return bool(loaded.moves) and loaded.move_next(self.kv_caches, self._draft_caches)

    def describe(self) -> dict[str, str | int]:
        if self.sleep_level:
            return {"ops": "asleep", "sleep_level": self.sleep_level}
        if (loaded := self._loaded) is None:
            return {"ops": "loading"}
        found: dict[str, str | int] = {"ops": loaded.model.ops.name}
        if loaded.model.ops.replaced:
            found["replaced_kernels"] = ", ".join(loaded.model.ops.replaced)
        if isinstance(self.model_config, TransformersConfig):
            found["model_impl"] = "transformers"
        if (ranks := loaded.ranks) is not None and ranks.layers:
            found["stages"] = ", ".join(f"layers {first} to {end - 1}" for first, end in ranks.layers)
        if loaded.native is not None:
            found["native_ops"] = loaded.native.status
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
        self._close_model()
        self._loaded = LoadedModel(self.config, self._worker_config, self.model_config, self.device)

    def _close_model(self) -> None:
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            loaded.close()

    def _size_cache(self) -> ResolvedConfig:
        sizer = CacheSizer(
            self.config, self._worker_config, self.model_config, self.model.kv_specs(),
            self.loaded.draft_specs, self.model.state_specs(),
            self.loaded.count_adapter_bytes(on_host=self._memory is None), self.loaded.stages,
        )
        if self._memory is not None:
            return sizer.measure(self._memory, self._run_largest_steps)
        return sizer.estimate(self.model.ops, self.loaded.native)

    def _compute_fingerprint(self, resolved: ResolvedConfig, block_size: int | None = None) -> str:
        """Return the fingerprint, by default for the config's block size."""
        config = self._worker_config
        is_sliced = self.config.tensor_parallel_size > 1 or self.config.batch_invariant_tp
        has_slices = (is_sliced, is_sliced and not self.config.enable_expert_parallel)  # of sums, of experts
        cache = replace(resolved.cache, block_size=block_size or resolved.cache.block_size)
        return compute_fingerprint(
            self.model.weights_hash, f"{self.model_config} {has_slices}", config.dtype, config.quantization,
            f"{choose_kv_dtype(config)} {self.model.ops.has_pieces}", cache,
        )  # fmt: skip

    def _run_largest_steps(self, resolved: ResolvedConfig) -> None:
        """Run the largest steps and the first recordings on a cache of one block, then free their memory."""
        cache = replace(resolved.cache, num_blocks=1, num_snapshots=0, num_draft_states=0)
        self.resolved = replace(resolved, cache=cache)
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
        if self.loaded.ranks is not None:
            self.loaded.ranks.allocate(self.resolved.cache, self.resolved.max_model_len)
        self.kv_caches = self._allocate(self.model.kv_specs()[self.loaded.stages[0]])
        cache = self.resolved.cache
        num_slots = self.resolved.scheduler.max_num_seqs + cache.num_snapshots + cache.num_draft_states
        self._state_caches = allocate_states(self.model.state_specs(), num_slots, self.device)
        self._draft_caches = self._allocate(self.loaded.draft_specs)
        self._open_host_store()
        self.model.limit_positions(self.resolved.max_model_len)
        if self.device.type == "cuda":
            # Recorded graphs contain the tables' addresses, so the tables must not be reallocated later.
            self.model.reserve_positions(self.resolved.max_model_len)
        self._adapter_tables = self._make_adapter_tables()
        self._graphs = self._make_graphs()

    def _open_host_store(self) -> None:
        """Make the store of the final cache, or give it a new cache after a sleep."""
        caches, ranks = [*self.kv_caches, *self._draft_caches], self.loaded.ranks
        first = self.resolved.scheduler.max_num_seqs
        states = [tensor[first:] for cache in self._state_caches for tensor in cache]
        if self._host_store is not None:
            self._host_store.attach(caches, states, ranks)
        elif self.resolved.cache.num_host_blocks and self.resolved.fingerprint:
            self._host_store = HostStore(
                SlotCopier(caches, self._list_head_parts(), states, self.model.ops.has_pieces), ranks,
                self.resolved.cache.num_host_blocks, self._compute_fingerprint(self.resolved, UNIT_TOKENS),
                count_units(self.resolved.cache.block_size),
            )

    def _list_head_parts(self) -> list[HeadPart]:
        """Return which KV heads the caches hold, layer after layer."""
        specs = [*self.model.kv_specs(), *self.loaded.draft_specs]
        parts = [(0, spec.num_kv_heads) for spec in specs]
        if isinstance(self.model, LeaderDecoder):
            shared = self.model.list_head_parts()
            parts[: len(shared)] = shared
        return parts

    def _allocate(self, specs: Sequence[KVCacheSpec]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        cache = self.resolved.cache
        return allocate_kv_cache(
            specs, cache.num_blocks, cache.block_size,
            choose_kv_dtype(self._worker_config), self.device,
            free_bytes=measure_host_memory()[1] if self.device.type == "cpu" else None,
        )

    def _measure_steps(self) -> tuple[tuple[int, float], ...]:
        """Measure steps of several sizes, for the choice of how many drafts to verify."""
        scheduler, found = self.resolved.scheduler, []
        deadline = time.perf_counter() + MEASURE_S
        for steps in list_measured_steps(scheduler, self.model_config.vocab_size):
            if time.perf_counter() > deadline:
                break
            found.append((steps[0].num_tokens, min(run_timed(self.runner, steps))))
            self.reset()
        return tuple(found)

    def _make_adapter_tables(self) -> AdapterTables | None:
        config, ops = self.config, self.model.ops
        has_slices = config.tensor_parallel_size > 1 or config.batch_invariant_tp
        if self.loaded.adapters is None or ops.lora_tables is None or has_slices:
            return None
        parts = self.model.matrix_parts.values()
        return AdapterTables(ops, parts, config.max_loras, config.max_lora_rank, self.device)

    def _make_graphs(self) -> DecodeGraphs | None:
        """Return decode graphs if the config enables them and the model allows it."""
        # A recorded graph would fix the sequence lengths, on which dynamic RoPE depends.
        is_static = self.model.ops.is_graph_safe and self.model_config.rope.rope_type != "dynamic"
        if not self.resolved.worker.enable_cuda_graphs or not is_static:
            return None
        scheduler = self.resolved.scheduler
        widths, max_drafts = [1], 0
        if (speculative := self.resolved.speculative) is not None:
            max_drafts = min(speculative.num_speculative_tokens, MAX_RECORDED_DRAFTS)
            # Tokens for each row on average; some rows may have more and others fewer.
            widths += [1 + count for count in (1, 3, 7) if count <= max_drafts]
        return DecodeGraphs(
            self.model, [*self.kv_caches, *self._state_caches], scheduler.max_num_seqs, scheduler.max_model_len,
            CudaGraphRecorder(), widths, 1 + max_drafts, self._adapter_tables,
        )
