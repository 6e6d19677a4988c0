"""EngineConfig: all settings of an engine in one flat class; `resolve_config` splits it by component.

EngineConfig(model=..., max_num_seqs=...)      set by users, flags and TROUPE_<FIELD>; "auto" allowed
    │ resolve_config
    ▼
ResolvedConfig(worker, cache, scheduler)       no "auto" left; logged once, never changed
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal, get_args

from engine.errors import ConfigError
from engine.kv_cache_spec import KVCacheGroup, KVCacheSpec, group_layers
from engine.spec.config import SpeculativeConfig, parse_speculative_config

DEMO_MODEL = str(Path(__file__).resolve().parents[1] / "assets" / "demo_model")
# Defaults by device: requests and tokens in one step.
STEP_LIMITS = {"cpu": (64, 1024), "cuda": (256, 8192)}
# Largest number of KV cache blocks chosen automatically, unless the largest batch needs more.
# Each block is a Python object.
AMPLE_BLOCKS = 2**18
MIN_KEY_LENGTH = 16

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
LoadFormat = Literal["auto", "dummy"]
SchedulingPolicy = Literal["fcfs", "priority"]
ModelImpl = Literal["auto", "troupe", "transformers"]
AttentionBackend = Literal["auto", "triton", "sdpa", "native"]
Quantization = Literal["none", "int8", "int4", "fp8"]
KVCacheDtype = Literal["auto", "fp8"]
CoreKind = Literal["auto", "local", "process"]
ParallelBackend = Literal["mp", "ray"]
RouterPolicy = Literal["prefix_aware", "least_load", "power_of_two", "round_robin", "consistent_hashing"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All settings of one engine. Every field is a flag of `python -m app` and an argument of `LLM(...)`.

    Raises:
        ConfigError: a value outside its range.
    """

    model: str = field(
        default=DEMO_MODEL, metadata={"help": "folder or hub name of a Hugging Face checkpoint"}
    )
    tokenizer: str | None = field(
        default=None, metadata={"help": "folder or hub name of the tokenizer; default: the model's"}
    )
    served_model_name: str | None = field(
        default=None,
        metadata={
            "help": "model name in the API, or several with commas; default: the last part of its path"
        },
    )
    load_format: LoadFormat = field(
        default="auto",
        metadata={"help": "dummy: random weights in the shapes of config.json, no checkpoint read"},
    )
    model_impl: ModelImpl = field(
        default="auto",
        metadata={
            "help": "code that runs the model: troupe: our decoder; transformers: the code of transformers over our "
            "KV cache; auto: troupe if it knows the architecture"
        },
    )
    dtype: Dtype = field(
        default="auto",
        metadata={
            "help": "dtype of the weights; auto: float32 on CPU, the checkpoint's dtype on CUDA. With bfloat16 on CPU "
            "the start waits for the native ops; without them an output may depend on the batch"
        },
    )
    device: Device = field(default="auto", metadata={"help": "auto: CUDA if available, else CPU"})
    attention_backend: AttentionBackend = field(
        default="auto",
        metadata={
            "help": "attention implementation; auto: triton on CUDA; on CPU sdpa until the native ops are built"
        },
    )
    quantization: Quantization = field(
        default="none",
        metadata={
            "help": "quantize the weights at load: int8 and int4 on any device, fp8 on CUDA. On CPU the start waits "
            "for the native ops"
        },
    )
    kv_cache_dtype: KVCacheDtype = field(
        default="auto", metadata={"help": "auto: the model's dtype; fp8: half the memory, CUDA only"}
    )
    enable_native_ops: bool = field(
        default=True,
        metadata={"help": "on CPU: build the C++ ops in the background and switch to them when ready"},
    )
    enable_cuda_graphs: bool = field(
        default=True,
        metadata={"help": "on CUDA: record decode steps as CUDA graphs in the background and replay them"},
    )
    check_syncs: bool = field(
        default=False,
        metadata={"help": "on CUDA, for debugging: fail if launching a step waits for the device"},
    )
    num_threads: int | None = field(
        default=None,
        metadata={
            "help": "CPU threads of a forward pass; default: cores - 1 for torch, all cores for the native ops"
        },
    )
    skip_tokenizer_init: bool = field(
        default=False, metadata={"help": "load no tokenizer: prompts and outputs are token ids"}
    )
    seed: int = field(default=0, metadata={"help": "seed of the dummy weights"})
    max_model_len: int | None = field(
        default=None,
        metadata={
            "help": "prompt + output tokens of a request; default: the checkpoint's limit, lowered to fit the KV cache"
        },
    )
    block_size: int = field(default=16, metadata={"help": "tokens in one KV cache block"})
    memory_share: float | None = field(
        default=None,
        metadata={
            "help": "share of memory for the KV cache; default: 0.1 of RAM or 0.9 of the GPU, at most 262,144 blocks"
        },
    )
    num_blocks: int | None = field(
        default=None,
        metadata={"help": "number of KV cache blocks, each for one group of layers, instead of memory_share"},
    )
    enable_prefix_caching: bool = field(
        default=True, metadata={"help": "reuse the KV cache blocks of shared prefixes"}
    )
    kv_offload_gb: float = field(
        default=0.0,
        metadata={
            "help": "GiB of host memory for blocks evicted from the KV cache; a later hit copies them back"
        },
    )
    kv_offload_file: str | None = field(
        default=None,
        metadata={
            "help": "file that holds kv_offload_gb instead of RAM, so that the blocks survive a restart"
        },
    )
    max_num_seqs: int | None = field(
        default=None,
        metadata={"help": "maximum number of requests in one step; default: 64 on CPU, 256 on CUDA"},
    )
    max_num_batched_tokens: int | None = field(
        default=None,
        metadata={
            "help": "maximum number of tokens in one step, prefill and decode together; "
            "default: 1,024 on CPU, 8,192 on CUDA, and at least max_num_seqs"
        },
    )
    enable_chunked_prefill: bool = field(
        default=True, metadata={"help": "compute long prompts in chunks over several steps"}
    )
    scheduling_policy: SchedulingPolicy = field(
        default="fcfs", metadata={"help": "fcfs: first come, first served; priority: lower values first"}
    )
    priority_ageing_s: float = field(
        default=10.0, metadata={"help": "seconds of waiting that lower a request's priority value by one"}
    )
    max_num_waiting: int = field(
        default=512,
        metadata={"help": "maximum number of waiting requests; further ones are rejected with 503"},
    )
    enable_overlap: bool = field(default=True, metadata={"help": "schedule step N+1 while step N runs"})
    grammar_timeout_s: float = field(default=10.0, metadata={"help": "time limit of one grammar compile"})
    max_restarts: int = field(
        default=3, metadata={"help": "maximum number of restarts after crashes within ten minutes"}
    )
    step_timeout_s: float = field(
        default=300.0,
        metadata={
            "help": "a step that takes longer counts as hung: stacks are logged and all requests fail; 0: no limit, "
            "and closing waits at most 30 s for the last step"
        },
    )
    core: CoreKind = field(
        default="auto",
        metadata={
            "help": "where the scheduler and the model run: local: in the server's process; process: in a process of "
            "their own, so that a crash does not end the server; auto: process on CUDA or with several replicas"
        },
    )
    tensor_parallel_size: int = field(
        default=1,
        metadata={
            "help": "number of ranks (1, 2, 4 or 8) that divide the matrices of one model, on this machine; each has "
            "its CUDA device, or its share of the CPU's cores"
        },
    )
    batch_invariant_tp: bool = field(
        default=False,
        metadata={
            "help": "compute sums on one rank as several ranks do, so that the same seed gives the same text for every "
            "tensor_parallel_size; slower"
        },
    )
    data_parallel_size: int = field(
        default=1, metadata={"help": "number of replicas of the model; requests are distributed over them"}
    )
    data_parallel_size_local: int | None = field(
        default=None,
        metadata={"help": "replicas on this machine; the others connect with --headless; default: all"},
    )
    data_parallel_backend: ParallelBackend = field(
        default="mp",
        metadata={
            "help": "who starts the replicas: mp: this server and --headless; ray: Ray, on the cluster of RAY_ADDRESS"
        },
    )
    data_parallel_address: str = field(
        default="127.0.0.1",
        metadata={"help": "address of the front, on which replicas of other machines connect to it"},
    )
    data_parallel_rpc_port: int = field(
        default=29550, metadata={"help": "port of the front for replicas of other machines"}
    )
    data_parallel_rank: int | None = field(
        default=None, metadata={"help": "with --headless: which replica this is, counted from 0"}
    )
    data_parallel_key: str | None = field(
        default=None,
        repr=False,
        metadata={
            "help": "secret that the front and replicas of other machines share, at least 16 characters"
        },
    )
    router_policy: RouterPolicy = field(
        default="prefix_aware",
        metadata={"help": "how the replica of a request is chosen, with several replicas"},
    )
    journal: str | None = field(
        default=None,
        metadata={
            "help": "file to which requests and answers are written; `replay` computes an answer again, bit for bit"
        },
    )
    journal_max_mib: int = field(
        default=1024, metadata={"help": "limit of the journal, in MiB; half of it is kept in FILE.1"}
    )
    journal_fsync: bool = field(
        default=False,
        metadata={"help": "let the journal survive a crash of the machine: fsync after each write"},
    )
    speculative_config: str | None = field(
        default=None,
        metadata={
            "help": 'JSON object with vLLM\'s keys, such as {"method": "ngram", "num_speculative_tokens": 4}; a method '
            "is ngram, suffix, draft_model, eagle, eagle3 or medusa, or a list of them. Drafts change no text"
        },
    )
    enable_lora: bool = field(default=False, metadata={"help": "serve adapters (LoRA) of the model"})
    lora_modules: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "adapters to load at the start, as name=folder or name=hub name",
            "takes_several": True,
        },
    )
    max_loras: int = field(default=8, metadata={"help": "maximum number of adapters in one step"})
    max_lora_rank: int = field(default=64, metadata={"help": "maximum rank of an adapter"})
    max_cpu_loras: int | None = field(
        default=None,
        metadata={
            "help": "memory for adapters, in adapters of max_lora_rank that change every matrix; default: 2 x max_loras"
        },
    )
    lora_root: tuple[str, ...] = field(
        default=(),
        metadata={"help": "folder from which adapters may be loaded while the server runs; default: none"},
    )
    mock_step_ms: float | None = field(
        default=None,
        metadata={
            "help": "load no model: answer every step after this many milliseconds, to measure the rest of the engine"
        },
    )

    def __post_init__(self) -> None:
        _check_choice(self, "load_format", ("auto", "dummy"))
        _check_choice(self, "model_impl", ("auto", "troupe", "transformers"))
        _check_choice(self, "dtype", ("auto", "float32", "bfloat16", "float16"))
        _check_choice(self, "device", ("auto", "cpu", "cuda"))
        _check_choice(self, "scheduling_policy", ("fcfs", "priority"))
        _check_choice(self, "attention_backend", ("auto", "triton", "sdpa", "native"))
        _check_choice(self, "quantization", ("none", "int8", "int4", "fp8"))
        _check_choice(self, "kv_cache_dtype", ("auto", "fp8"))
        _check_choice(self, "core", get_args(CoreKind))
        _check_choice(self, "router_policy", get_args(RouterPolicy))
        _check_choice(self, "data_parallel_backend", get_args(ParallelBackend))
        for name in ("enable_native_ops", "enable_cuda_graphs", "check_syncs"):
            _check_switch(self, name)
        _check_switch(self, "skip_tokenizer_init")
        _check_switch(self, "enable_prefix_caching")
        _check_switch(self, "enable_chunked_prefill")
        _check_switch(self, "enable_overlap")
        _check_switch(self, "batch_invariant_tp")
        _check_switch(self, "enable_lora")
        _check_range(self, "max_loras", 1, 1024)
        _check_range(self, "max_lora_rank", 1, 4096)
        _check_range(self, "max_cpu_loras", self.max_loras, 2**20)
        for name in ("lora_modules", "lora_root"):
            if getattr(self, name) and not self.enable_lora:
                raise ConfigError(f"{name} needs enable_lora")
        self.read_lora_modules()
        if self.enable_lora:
            for name, other in (
                ("tensor_parallel_size", 1),
                ("batch_invariant_tp", False),
                ("mock_step_ms", None),
            ):
                if (value := getattr(self, name)) != other:
                    raise ConfigError(
                        f"{name}={value!r} does not work with enable_lora; it must be {other!r}"
                    )
        _check_switch(self, "journal_fsync")
        _check_range(self, "journal_max_mib", 1, 2**20)
        _check_range(self, "num_threads", 1, 1024)
        _check_range(self, "seed", 0, 2**63 - 1)
        _check_range(self, "max_model_len", 2, 2**24)
        _check_range(self, "block_size", 1, 1024)
        _check_range(self, "memory_share", 0.001, 1.0)
        _check_range(self, "num_blocks", 2, 2**31 - 1)
        _check_range(self, "kv_offload_gb", 0.0, 2**20)
        if self.kv_offload_file is not None and not self.kv_offload_gb:
            raise ConfigError("kv_offload_file needs kv_offload_gb, the size of the file")
        if self.kv_offload_gb and self.tensor_parallel_size > 1:
            raise ConfigError("kv_offload_gb does not work with tensor_parallel_size yet")
        _check_range(self, "max_num_seqs", 1, 4096)
        _check_range(self, "max_num_batched_tokens", 1, 2**24)
        _check_range(self, "priority_ageing_s", 0.001, 86400.0)
        _check_range(self, "max_num_waiting", 1, 2**20)
        _check_range(self, "grammar_timeout_s", 0.01, 3600.0)
        _check_range(self, "max_restarts", 0, 1000)
        _check_range(self, "step_timeout_s", 0.0, 86400.0)
        _check_range(self, "mock_step_ms", 0.0, 10000.0)
        _check_choice(self, "tensor_parallel_size", (1, 2, 4, 8))
        _check_range(self, "data_parallel_size", 1, 256)
        if self.core == "local" and self.data_parallel_size > 1:
            raise ConfigError(
                f"core=local runs one replica, and data_parallel_size={self.data_parallel_size}"
            )
        _check_range(self, "data_parallel_size_local", 0, self.data_parallel_size)
        _check_range(self, "data_parallel_rpc_port", 0, 65535)
        _check_range(self, "data_parallel_rank", 0, self.data_parallel_size - 1)
        if self.data_parallel_key is not None and len(self.data_parallel_key) < MIN_KEY_LENGTH:
            raise ConfigError(f"data_parallel_key must have at least {MIN_KEY_LENGTH} characters")
        is_ray = self.data_parallel_backend == "ray"
        if is_ray and self.data_parallel_size_local is not None:
            raise ConfigError("data_parallel_size_local has no meaning with data_parallel_backend=ray")
        if self.num_remote_replicas and self.data_parallel_key is None and not is_ray:
            raise ConfigError("replicas on other machines need data_parallel_key")
        given: object = self.speculative_config
        if isinstance(given, Mapping):  # as LLM(speculative_config={...}) passes it
            object.__setattr__(self, "speculative_config", json.dumps(dict(given)))
        self.read_speculative()
        self.find_step_limits("cpu")

    def find_step_limits(self, device: str) -> tuple[int, int]:
        """Return the maximum numbers of requests and of tokens in one step on this device.

        Raises:
            ConfigError: a request would get no token.
        """
        default_seqs, default_tokens = STEP_LIMITS[device]
        num_tokens = self.max_num_batched_tokens or max(default_tokens, self.max_num_seqs or 0)
        # Few tokens lower the default of a GPU to that of the CPU, so that a config is valid on both or on neither.
        least_seqs, _ = STEP_LIMITS["cpu"]
        num_seqs = self.max_num_seqs or min(default_seqs, max(num_tokens, least_seqs))
        if num_tokens < num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={num_tokens} must be at least max_num_seqs={num_seqs}, so that every running "
                "request gets one token a step"
            )
        return num_seqs, num_tokens

    def read_speculative(self) -> SpeculativeConfig | None:
        """Return the parsed `speculative_config`; None without one.

        Raises:
            ConfigError: a key is unknown, or a value is outside its range.
        """
        given: object = self.speculative_config
        if given is None:
            return None
        if not isinstance(given, str):
            raise ConfigError(f"speculative_config={given!r} must be a JSON object")
        return parse_speculative_config(given)

    def read_lora_modules(self) -> dict[str, str]:
        """Return the paths of the adapters to load at the start, by name.

        Raises:
            ConfigError: an entry is not name=path, or a name appears twice.
        """
        found: dict[str, str] = {}
        for entry in self.lora_modules:
            name, separator, path = entry.partition("=")
            if not (name and separator and path) or name in found:
                raise ConfigError(f"lora_modules: {entry!r} must be name=path, each name once")
            found[name] = path
        return found

    @property
    def num_remote_replicas(self) -> int:
        """Number of replicas that other machines run."""
        local = 0 if self.data_parallel_backend == "ray" else self.data_parallel_size_local
        return 0 if local is None else self.data_parallel_size - local

    @property
    def model_name(self) -> str:
        """The first model name in the API."""
        return self.served_names[0]

    @property
    def served_names(self) -> tuple[str, ...]:
        """All model names in the API."""
        given = [name.strip() for name in (self.served_model_name or "").split(",") if name.strip()]
        return tuple(given) or (Path(self.model).name or self.model,)


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Size of the KV cache: `num_blocks` blocks of `block_size` tokens; block 0 is the null block."""

    num_blocks: int
    block_size: int
    enable_prefix_caching: bool
    groups: tuple[KVCacheGroup, ...]
    max_chunk_len: int  # most tokens of a prompt in one step
    num_host_blocks: int = 0  # blocks that the host keeps after they were evicted


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one step, and the order of waiting requests."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool
    policy: SchedulingPolicy
    priority_ageing_s: float
    max_steps_in_flight: int  # 2 with overlap, else 1
    max_loras: int = 0  # adapters in one step


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
    check_syncs: bool = False


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """An EngineConfig with every "auto" filled in, split by component."""

    worker: WorkerConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    notices: tuple[str, ...] = ()  # log messages about settings that were changed to fit
    # Of weights, arithmetic and KV layout, see `compute_fingerprint`; "" where there is no model.
    fingerprint: str = ""

    @property
    def max_model_len(self) -> int:
        return self.scheduler.max_model_len


def _check_choice(config: EngineConfig, name: str, allowed: tuple[str | int, ...]) -> None:
    value = getattr(config, name)
    if value not in allowed:
        raise ConfigError(f"{name}={value!r} must be one of {', '.join(map(str, allowed))}")


def _check_switch(config: EngineConfig, name: str) -> None:
    value = getattr(config, name)
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r} must be true or false")


def _check_range(config: EngineConfig, name: str, low: float, high: float) -> None:
    value = getattr(config, name)
    if value is None and next(f for f in fields(config) if f.name == name).default is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ConfigError(f"{name}={value!r} must be a number from {low} to {high}")
    if isinstance(low, int) and not isinstance(value, int):
        raise ConfigError(f"{name}={value!r} must be an integer from {low} to {high}")


def resolve_config(
    config: EngineConfig,
    worker: WorkerConfig,
    *,
    model_max_len: int,
    free_bytes: int,
    bytes_per_block: int,
    kv_specs: Sequence[KVCacheSpec],
) -> ResolvedConfig:
    """Fill in every "auto" and size the KV cache.

    Args:
        model_max_len: context length of the checkpoint.
        free_bytes: memory that the KV cache may take.
        bytes_per_block: size of one block over all layers of a group.
        kv_specs: shape of each layer's keys and values.

    Raises:
        ConfigError: the cache cannot hold one request, or `max_model_len` exceeds the checkpoint's.
    """
    notices = []
    groups = group_layers(kv_specs)
    max_num_seqs, max_num_batched_tokens = config.find_step_limits(worker.device)
    num_blocks = config.num_blocks or free_bytes // bytes_per_block
    if config.num_blocks is None and config.memory_share is None:
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
        priority_ageing_s=config.priority_ageing_s,
        max_steps_in_flight=2 if config.enable_overlap else 1,
        max_loras=config.max_loras if config.enable_lora else 0,
    )
    cache = CacheConfig(
        num_blocks,
        config.block_size,
        config.enable_prefix_caching,
        groups,
        max_num_batched_tokens,
        num_host_blocks=int(config.kv_offload_gb * 2**30) // bytes_per_block,
    )
    return ResolvedConfig(worker, cache, scheduler, tuple(notices))


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
