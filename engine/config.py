"""EngineConfig: all settings of an engine in one flat class; each is a flag, a keyword of `LLM` and TROUPE_<FIELD>.

"auto" and None mean that `engine.resolved_config` chooses by device and checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from engine.errors import ConfigError
from engine.spec.config import SpeculativeConfig, parse_speculative_config
from engine.transfer.config import TCP, KVTransferConfig, parse_kv_transfer_config
from engine.transfer.units import UNIT_TOKENS

DEMO_MODEL = str(Path(__file__).resolve().parents[1] / "assets" / "demo_model")
# Defaults by device: requests and tokens in one step.
STEP_LIMITS = {"cpu": (64, 1024), "cuda": (256, 8192)}
MIN_KEY_LENGTH = 16
TRANSFER_GB = (
    0.5  # default of kv_offload_gb with a kv_transfer_config: all transfers pass through host memory
)
_RANGES: dict[str, tuple[float, float]] = {
    "num_threads": (1, 1024),
    "seed": (0, 2**63 - 1),
    "max_model_len": (2, 2**24),
    "block_size": (1, 1024),
    "memory_share": (0.001, 1.0),
    "num_blocks": (2, 2**31 - 1),
    "kv_offload_gb": (0.0, 2**20),
    "max_num_seqs": (1, 4096),
    "max_num_batched_tokens": (1, 2**24),
    "priority_ageing_s": (0.001, 86400.0),
    "max_num_waiting": (1, 2**20),
    "mm_encoder_cache_gb": (0.0, 2**20),
    "grammar_timeout_s": (0.01, 3600.0),
    "max_restarts": (0, 1000),
    "step_timeout_s": (0.0, 86400.0),
    "mock_step_ms": (0.0, 10000.0),
    "max_loras": (1, 1024),
    "max_lora_rank": (1, 4096),
    "journal_max_mib": (1, 2**20),
    "pipeline_parallel_size": (1, 64),
    "nnodes": (1, 64),
    "master_port": (1, 65535),
    "data_parallel_size": (1, 256),
    "data_parallel_rpc_port": (0, 65535),
}

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
LoadFormat = Literal["auto", "dummy"]
SchedulingPolicy = Literal["fcfs", "priority"]
ModelImpl = Literal["auto", "troupe", "transformers"]
AttentionBackend = Literal["auto", "triton", "sdpa", "native"]
Quantization = Literal["none", "int8", "int4", "fp8"]
KVCacheDtype = Literal["auto", "int8", "fp8"]
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
            "help": "dtype of the weights; auto: the checkpoint's dtype on CUDA; on CPU bfloat16 if the checkpoint, "
            "the native ops and the processor have it, from 100 million parameters, else float32; with bfloat16 "
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
        default="auto",
        metadata={
            "help": "auto: the model's dtype; int8: half of bfloat16's memory, on CPU; fp8: the same on CUDA"
        },
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
    kv_transfer_config: str | None = field(
        default=None,
        metadata={
            "help": "JSON object with vLLM's keys, such as "
            '{"kv_connector": "SharedMemoryConnector", "kv_role": "kv_both"}: cores exchange KV blocks through '
            "SharedMemoryConnector, FileConnector, TcpConnector or a class of yours"
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
    mm_encoder_cache_gb: float = field(
        default=0.5,
        metadata={"help": "GiB of host memory for encoded images, so that a repeated image is encoded once"},
    )
    allowed_media_domains: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "host from which images of requests may be fetched; default: none, only data: URLs",
            "takes_several": True,
        },
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
    pipeline_parallel_size: int = field(
        default=1,
        metadata={
            "help": "number of stages that divide the layers of one model, on this machine, each with "
            "tensor_parallel_size ranks; as many batches run at a time"
        },
    )
    batch_invariant_tp: bool = field(
        default=False,
        metadata={
            "help": "compute sums on one rank as several ranks do, so that the same seed gives the same text for every "
            "tensor_parallel_size; slower"
        },
    )
    enable_expert_parallel: bool = field(
        default=False,
        metadata={
            "help": "ranks hold whole experts instead of a part of each: fewer, larger products, but uneven work where "
            "a step has few tokens"
        },
    )
    nnodes: int = field(
        default=1,
        metadata={
            "help": "number of machines over which the ranks of one model are distributed; needs data_parallel_key"
        },
    )
    node_rank: int = field(
        default=0,
        metadata={
            "help": "which of them this is; node 0 serves, the others only compute, with the same flags"
        },
    )
    master_addr: str = field(
        default="127.0.0.1",
        metadata={"help": "address of node 0, on which the ranks of other nodes connect to it"},
    )
    master_port: int = field(default=29501, metadata={"help": "port of node 0 for the ranks of other nodes"})
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
        for name, hint in _find_hints().items():
            if get_origin(hint) is Literal:
                _check_choice(self, name, get_args(hint))
            elif hint is bool:
                _check_switch(self, name)
        for name, (low, high) in _RANGES.items():
            _check_range(self, name, low, high)
        self._check_adapters()
        self._check_replicas()
        _check_choice(self, "tensor_parallel_size", (1, 2, 4, 8))
        self._check_stages()
        self._check_nodes()
        if self.kv_offload_file is not None and not self.kv_offload_gb:
            raise ConfigError("kv_offload_file needs kv_offload_gb, the size of the file")
        for name in ("speculative_config", "kv_transfer_config"):
            given: object = getattr(self, name)
            if isinstance(given, Mapping):  # as LLM(speculative_config={...}) passes it
                object.__setattr__(self, name, json.dumps(dict(given)))
        self.read_speculative()
        self._check_kv_transfer()
        self.find_step_limits("cpu")

    def _check_stages(self) -> None:
        needed = {"kv_offload_gb": 0.0, "kv_transfer_config": None, "enable_lora": False}
        for name, other in needed.items() if self.pipeline_parallel_size > 1 else ():
            if (value := getattr(self, name)) != other:
                raise ConfigError(
                    f"{name}={value!r} does not work with pipeline_parallel_size above 1; it must be {other!r}"
                )

    def _check_nodes(self) -> None:
        _check_range(self, "node_rank", 0, self.nnodes - 1)
        if self.num_ranks % self.nnodes:
            raise ConfigError(f"nnodes={self.nnodes} does not divide the {self.num_ranks} ranks of the model")
        needed = {"data_parallel_size": 1, "kv_offload_gb": 0.0, "kv_transfer_config": None}
        for name, other in needed.items() if self.nnodes > 1 else ():
            if (value := getattr(self, name)) != other:
                raise ConfigError(f"{name}={value!r} does not work with nnodes above 1; it must be {other!r}")
        if self.nnodes > 1 and self.data_parallel_key is None:
            raise ConfigError("nnodes above 1 needs data_parallel_key")

    def _check_adapters(self) -> None:
        _check_range(self, "max_cpu_loras", self.max_loras, 2**20)
        for name in ("lora_modules", "lora_root"):
            if getattr(self, name) and not self.enable_lora:
                raise ConfigError(f"{name} needs enable_lora")
        self.read_lora_modules()
        if self.enable_lora and self.mock_step_ms is not None:
            raise ConfigError(
                f"mock_step_ms={self.mock_step_ms!r} does not work with enable_lora; it must be None"
            )

    def _check_replicas(self) -> None:
        size, is_ray = self.data_parallel_size, self.data_parallel_backend == "ray"
        if self.core == "local" and size > 1:
            raise ConfigError(f"core=local runs one replica, and data_parallel_size={size}")
        _check_range(self, "data_parallel_size_local", 0, size)
        _check_range(self, "data_parallel_rank", 0, size - 1)
        if self.data_parallel_key is not None and len(self.data_parallel_key) < MIN_KEY_LENGTH:
            raise ConfigError(f"data_parallel_key must have at least {MIN_KEY_LENGTH} characters")
        if is_ray and self.data_parallel_size_local is not None:
            raise ConfigError("data_parallel_size_local has no meaning with data_parallel_backend=ray")
        if self.num_remote_replicas and self.data_parallel_key is None and not is_ray:
            raise ConfigError("replicas on other machines need data_parallel_key")

    def _check_kv_transfer(self) -> None:
        config = self.read_kv_transfer()
        if config is None:
            return
        if self.block_size % UNIT_TOKENS:
            raise ConfigError(
                f"block_size={self.block_size} must be a multiple of {UNIT_TOKENS} with kv_transfer_config"
            )
        if not self.enable_prefix_caching:
            raise ConfigError("kv_transfer_config needs enable_prefix_caching")
        if config.kv_connector == TCP and self.data_parallel_key is None:
            raise ConfigError(f"kv_transfer_config: {TCP} needs data_parallel_key")
        if config.num_prefill_replicas >= self.data_parallel_size > 0 < config.num_prefill_replicas:
            raise ConfigError(
                f"kv_transfer_config: prefill_replicas={config.num_prefill_replicas} must be less than "
                f"data_parallel_size={self.data_parallel_size}"
            )

    def find_step_limits(self, device: str) -> tuple[int, int]:
        """Return the maximum numbers of requests and of tokens in one step on this device.

        Raises:
            ConfigError: a request would get no token.
        """
        default_seqs, default_tokens = STEP_LIMITS[device]
        # Stages work at the same time if a prompt takes several steps.
        default_tokens = max(default_tokens // self.pipeline_parallel_size, default_seqs)
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

    def read_kv_transfer(self) -> KVTransferConfig | None:
        """Return the parsed `kv_transfer_config`; None without one.

        Raises:
            ConfigError: a key is unknown, or a value is outside its range.
        """
        given: object = self.kv_transfer_config
        if given is None:
            return None
        if not isinstance(given, str):
            raise ConfigError(f"kv_transfer_config={given!r} must be a JSON object")
        return parse_kv_transfer_config(given)

    @property
    def num_ranks(self) -> int:
        """Number of processes that compute one model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def ranks_per_node(self) -> int:
        return self.num_ranks // self.nnodes

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory for blocks outside the KV cache."""
        gib = self.kv_offload_gb or (0.0 if self.kv_transfer_config is None else TRANSFER_GB)
        return int(gib * 2**30)

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


@cache
def _find_hints() -> dict[str, Any]:
    """Return the types of the fields by name."""
    return get_type_hints(EngineConfig)


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
