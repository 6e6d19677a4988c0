"""CacheSizer: computes the number of KV cache blocks and the resolved config.

host    memory of the largest step is estimated (`step_memory`), and the cache gets a share of the rest
GPU     the largest steps run on a cache of one block, and their memory is measured (`device`)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from engine.config import EngineConfig
from engine.device.device_memory import DeviceMemory
from engine.device.kv_cache import DTYPES, choose_kv_dtype, compute_bytes_per_block
from engine.device.native_swap import NativeSwap
from engine.errors import ConfigError
from engine.host_memory import measure_host_memory, measure_unified_memory
from engine.kv_cache_spec import KVCacheSpec, StateCacheSpec
from engine.model import ModelConfig
from engine.parallel.stages import compute_context_cost
from engine.resolved_config import ResolvedConfig, WorkerConfig, resolve_config
from engine.worker.step_memory import StepMemory
from kernels import Ops
from kernels.ops import StepShape

logger = logging.getLogger("troupe.worker")

HOST_SHARE, DEVICE_SHARE = 0.1, 0.9
# Reserve for fragmentation of torch's allocator by other mixtures of lengths.
PEAK_MARGIN = 1.1


@dataclass(frozen=True, slots=True)
class CacheSizer:
    """Sizes the cache of one model on one device."""

    config: EngineConfig
    worker: WorkerConfig
    model: ModelConfig
    kv_specs: Sequence[KVCacheSpec]  # one per layer
    draft_specs: Sequence[KVCacheSpec] = ()  # layers of a drafter, which share the blocks of the first group
    state_specs: Sequence[StateCacheSpec] = ()  # one per layer with a state
    adapter_bytes: int = 0  # kept free for adapters
    held_layers: Sequence[slice] = (slice(None),)  # layers of each stage

    def estimate(self, ops: Ops, native: NativeSwap | None) -> ResolvedConfig:
        """Resolve the config for the host."""
        config = self.config
        # On a CPU all ranks use the same memory.
        kept_bytes = self.adapter_bytes * config.tensor_parallel_size
        kept_bytes += 0 if native is None else native.estimate_move(self.model)

        def estimate_scratch(shape: StepShape) -> int:
            return max(ops.estimate_scratch(shape), 0 if native is None else native.estimate_scratch(shape))

        max_len = config.max_model_len or self.model.max_model_len
        num_rows, num_tokens = config.find_step_limits(self.worker.device)
        num_tokens = max(num_tokens, 0 if config.enable_chunked_prefill else max_len)
        step = StepMemory(
            self.model, DTYPES[self.worker.dtype], num_tokens=num_tokens, num_rows=num_rows,
            estimate_scratch=estimate_scratch,
        )
        # No row is longer than the cache, so estimate rows and attention scratch with the cache's capacity.
        cache_bytes = self._share_host(step.estimate_step() + kept_bytes)
        capacity = cache_bytes // self._bytes_per_block * config.block_size
        length = min(max_len, capacity)
        step_bytes = step.estimate_step(length, min(length * num_rows, capacity))
        row_bytes = step.estimate_rows(length, config.block_size)
        return self.resolve(self._share_host(step_bytes + row_bytes + kept_bytes))

    def measure(self, memory: DeviceMemory, run_largest: Callable[[ResolvedConfig], None]) -> ResolvedConfig:
        """Resolve the config for a device whose memory can be measured."""
        # Upper bound of the row length; the measured memory of the largest steps may reduce it.
        resolved = self.resolve(self._share_device(memory, 0))
        if self.config.num_blocks is not None or self.config.kv_cache_memory_bytes is not None:
            return resolved
        scheduler = resolved.scheduler
        try:
            peak = memory.measure_peak(lambda: run_largest(resolved))
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"a step of max_num_batched_tokens={scheduler.max_num_batched_tokens} tokens in "
                f"max_num_seqs={scheduler.max_num_seqs} rows does not fit beside the weights; lower one of them, or "
                f"max_model_len. {str(error).partition(chr(10))[0]}"
            ) from error
        logger.info("the largest steps need %.2f GiB in addition to weights and KV cache", peak / 2**30)
        return self.resolve(self._share_device(memory, int(peak * PEAK_MARGIN)))

    def _share_host(self, step_bytes: int) -> int:
        """Return the cache's bytes: the configured share, at most 80 % of what the largest step leaves free."""
        measure = measure_unified_memory if self.worker.device == "mps" else measure_host_memory
        total, free = measure()
        if self.config.kv_cache_memory_bytes is not None:
            return self.config.kv_cache_memory_bytes
        share = self.config.memory_share or HOST_SHARE
        return min(int(total * share), int(max(0, free - step_bytes) * 0.8))

    def _share_device(self, memory: DeviceMemory, step_bytes: int) -> int:
        """Return the cache's bytes: the configured share less used memory, at most what the largest step leaves."""
        if self.config.kv_cache_memory_bytes is not None:
            return self.config.kv_cache_memory_bytes
        total, free = memory.measure()
        step_bytes += self.adapter_bytes
        share = self.config.memory_share or DEVICE_SHARE
        return max(0, min(int(total * share) - (total - free), free - step_bytes))

    @property
    def _bytes_per_block(self) -> int:
        size = self.config.block_size
        dtype = choose_kv_dtype(self.worker)
        stages = [compute_bytes_per_block(self.kv_specs[held], size, dtype) for held in self.held_layers]
        num_draft_bytes = compute_bytes_per_block(self.draft_specs, size, dtype)
        if self.worker.device == "cuda":
            return max(stages[0] + num_draft_bytes, *stages)
        # On a CPU all ranks use the same memory.
        return (sum(stages) + num_draft_bytes) * self.config.tensor_parallel_size

    def resolve(self, free_bytes: int) -> ResolvedConfig:
        resolved = resolve_config(
            self.config, self.worker, model_max_len=self.model.max_model_len, free_bytes=free_bytes,
            bytes_per_block=self._bytes_per_block, kv_specs=self.kv_specs,
            state_bytes=sum(spec.num_bytes for spec in self.state_specs),
            context_cost=compute_context_cost(self.model) if len(self.held_layers) > 1 else 0.0,
        )
        return self._respect_dynamic_rope(resolved)

    def _respect_dynamic_rope(self, resolved: ResolvedConfig) -> ResolvedConfig:
        """Disable prefix caching for dynamic RoPE, which rotates keys by the length of their own request."""
        rope = self.model.rope
        original = rope.original_max_position_embeddings
        if rope.rope_type != "dynamic" or resolved.max_model_len <= original:
            return resolved
        notice = (
            f"dynamic RoPE up to {resolved.max_model_len} tokens: prefixes are not cached, and beyond {original} "
            f"tokens the same seed need not give the same text in another batch; max_model_len={original} keeps both"
        )
        cache = replace(resolved.cache, enable_prefix_caching=False)
        return replace(resolved, cache=cache, notices=(*resolved.notices, notice))
