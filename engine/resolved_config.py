"""ResolvedConfig: an EngineConfig with every "auto" filled in, split by component.

EngineConfig + what the device and the checkpoint allow ── resolve_config ──▶ ResolvedConfig(worker, cache, scheduler)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from engine.config import EngineConfig
from engine.config_fields import LoadFormat, Quantization, SchedulingPolicy
from engine.errors import ConfigError
from engine.kv_cache_spec import KVCacheGroup, KVCacheSpec, group_layers
from engine.kv_transfer_config import count_units
from engine.speculative_config import SpeculativeConfig

# Largest number of KV cache blocks chosen automatically, unless the largest batch needs more.
# Each block is a Python object.
AMPLE_BLOCKS = 2**18
AMPLE_SNAPSHOTS = 2**12  # of states, chosen automatically


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Size of the KV cache: `num_blocks` blocks of `block_size` tokens; block 0 is the null block."""

    num_blocks: int
    block_size: int
    enable_prefix_caching: bool
    groups: tuple[KVCacheGroup, ...]
    max_chunk_len: int  # most tokens of a prompt in one step
    num_host_blocks: int = 0  # blocks that the host keeps after they were evicted
    has_states: bool = False  # whether layers keep a state per request
    num_snapshots: int = 0  # of states, in the prefix cache
    num_draft_states: int = 0  # states that can be kept of drafts
    num_state_units: int = 0  # units of the store that a state takes
    num_bytes: int = 0  # of all blocks, on each rank

    @property
    def num_state_parts(self) -> int:
        """Number of parts in which a state is moved, each of the size of a block."""
        return -(-self.num_state_units // count_units(self.block_size))


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one step, and the order of waiting requests."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool
    policy: SchedulingPolicy
    max_steps_in_flight: int  # 1 without overlap; else as many as there are stages, at least 2
    max_loras: int = 0  # adapters in one step
    num_stages: int = 1  # of a pipeline, each of which computes another step
    max_chunk_tokens: int = 0  # of one prompt in a step; 0: as many as fit
    context_cost: float = 0.0  # time of attending to one token, relative to a token's time without attention


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Where and how the model runs. `dtype` and `device` are torch names."""

    model: str
    load_format: LoadFormat
    dtype: str
    device: str
    num_threads: int
    seed: int
    attention_backend: str = "sdpa"  # at the start; native ops may replace it later
    quantization: Quantization = "none"
    kv_cache_dtype: str = "auto"  # auto: same as `dtype`
    enable_native_ops: bool = False
    enable_cuda_graphs: bool = False


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """An EngineConfig with every "auto" filled in, split by component."""

    worker: WorkerConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    notices: tuple[str, ...] = ()  # log messages about settings that were changed to fit
    # Covers weights, arithmetic and KV layout, see `compute_fingerprint`; "" where there is no model.
    fingerprint: str = ""
    kv_role: str = ""  # of `kv_transfer_config`; "" without one
    speculative: SpeculativeConfig | None = None  # None: no drafts

    @property
    def max_model_len(self) -> int:
        return self.scheduler.max_model_len


def resolve_config(
    config: EngineConfig, worker: WorkerConfig, *, model_max_len: int, free_bytes: int, bytes_per_block: int,
    kv_specs: Sequence[KVCacheSpec], state_bytes: int = 0, context_cost: float = 0.0,
) -> ResolvedConfig:
    """Fill in every "auto" and size the KV cache.

    Args:
        free_bytes: memory that the KV cache may take.
        bytes_per_block: size of one block over all layers of a group.
        state_bytes: size of one request's state; 0: the model has none.

    Raises:
        ConfigError: the cache cannot hold one request, or `max_model_len` exceeds the checkpoint's.
    """
    notices = []
    groups = group_layers(kv_specs)
    max_num_seqs, max_num_batched_tokens = config.find_step_limits(worker.device)
    num_snapshots = num_draft_states = 0
    if state_bytes:
        wanted, room = max_num_seqs, free_bytes // 2 // state_bytes
        if (speculative := config.read_speculative()) is not None:
            num_draft_states = min(speculative.num_speculative_tokens * max_num_seqs, room // 4)
        max_num_seqs, num_snapshots = _share_states(
            room - num_draft_states, max_num_seqs, config.enable_prefix_caching
        )
        if max_num_seqs < wanted:
            notices.append(
                f"max_num_seqs lowered from {wanted} to {max_num_seqs}: the state of a request takes "
                f"{state_bytes / 2**20:.1f} MiB; raise memory_share for more"
            )
        free_bytes -= (max_num_seqs + num_snapshots + num_draft_states) * state_bytes
    num_blocks = config.num_blocks or free_bytes // bytes_per_block
    if config.num_blocks is None is config.memory_share is config.kv_cache_memory_bytes:
        # A GPU holds millions of blocks of a tiny model, and creating them takes seconds at every start.
        longest = config.max_model_len or model_max_len
        largest_batch = len(groups) * max_num_seqs * longest // config.block_size
        num_blocks = min(num_blocks, max(AMPLE_BLOCKS, largest_batch + 1))
    if num_blocks < 2:
        raise ConfigError(
            f"the KV cache gets {free_bytes / 2**20:.0f} MiB, and one block takes {bytes_per_block / 2**20:.1f} MiB; "
            "raise memory_share, or lower block_size"
        )
    if config.max_model_len is not None and config.max_model_len > model_max_len:
        raise ConfigError(f"max_model_len={config.max_model_len} exceeds the checkpoint's {model_max_len}")
    max_model_len = config.max_model_len or model_max_len
    max_chunk_len = max_num_batched_tokens if config.enable_chunked_prefill else max_model_len
    capacity = _find_capacity(groups, num_blocks, config.block_size, max_model_len, max_chunk_len)
    if capacity < 2:
        raise ConfigError(
            f"num_blocks={num_blocks} with block_size={config.block_size} hold {capacity} tokens of {len(groups)} "
            "groups of layers, because block 0 is reserved, and a request needs at least 2 tokens; "
            "raise num_blocks (or memory_share), or block_size"
        )
    if max_model_len > capacity:
        notices.append(f"max_model_len lowered from {max_model_len} to {capacity} to fit the KV cache")
        max_model_len = capacity
    if not config.enable_chunked_prefill and max_num_batched_tokens < max_model_len:
        notices.append(f"max_num_batched_tokens raised to {max_model_len}, because chunked prefill is off")
        max_num_batched_tokens = max_model_len
    scheduler = SchedulerConfig(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_chunked_prefill=config.enable_chunked_prefill,
        policy=config.scheduling_policy,
        max_steps_in_flight=max(2, config.pipeline_parallel_size) if config.enable_overlap else 1,
        max_loras=config.max_loras if config.enable_lora else 0,
        num_stages=config.pipeline_parallel_size,
        max_chunk_tokens=config.long_prefill_token_threshold,
        context_cost=context_cost if config.enable_chunked_prefill else 0.0,
    )
    num_state_units = -(-state_bytes * count_units(config.block_size) // bytes_per_block)
    cache = CacheConfig(
        num_blocks, config.block_size, config.enable_prefix_caching, groups, max_num_batched_tokens,
        num_host_blocks=config.host_bytes // (bytes_per_block * config.tensor_parallel_size),
        has_states=state_bytes > 0, num_snapshots=num_snapshots, num_draft_states=num_draft_states,
        num_state_units=num_state_units, num_bytes=num_blocks * bytes_per_block,
    )
    if 0 < cache.num_host_blocks < cache.num_state_parts:
        raise ConfigError(
            f"kv_offload_gb: {config.host_bytes} bytes cannot hold the state of one request, {state_bytes} bytes; "
            "raise it"
        )
    transfer = config.read_kv_transfer()
    kv_role = "" if transfer is None else transfer.kv_role
    return ResolvedConfig(
        worker, cache, scheduler, tuple(notices), kv_role=kv_role, speculative=config.read_speculative()
    )


def _share_states(room: int, max_num_seqs: int, has_snapshots: bool) -> tuple[int, int]:
    """Return how many rows have a state, and the number of snapshots, which get at least half of the room."""
    if room < 1:
        raise ConfigError(
            "half of the cache's memory cannot hold the state of one request; raise memory_share"
        )
    if not has_snapshots:
        return min(max_num_seqs, room), 0
    num_rows = min(max_num_seqs, max(1, room // 2))
    return num_rows, min(room - num_rows, AMPLE_SNAPSHOTS)


def _find_capacity(
    groups: Sequence[KVCacheGroup], num_blocks: int, block_size: int, max_model_len: int, max_chunk_len: int
) -> int:
    """Return the length of the longest request, up to `max_model_len` in whole blocks, that fits into the cache."""

    def count_blocks(num_columns: int) -> int:
        return sum(
            group.count_blocks(num_columns * block_size, max_chunk_len, block_size) for group in groups
        )

    columns = range(-(-max_model_len // block_size) + 1)
    return (bisect_right(columns, num_blocks - 1, key=count_blocks) - 1) * block_size
