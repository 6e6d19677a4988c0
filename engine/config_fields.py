"""EngineFields: all settings of an engine in one flat class, with their help texts.

"auto" and None mean that `engine.resolved_config` chooses by device and checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

DEMO_MODEL = str(Path(__file__).resolve().parents[1] / "assets" / "demo_model")

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
RouterPolicy = Literal["prefix_aware", "round_robin"]


@dataclass(frozen=True, slots=True)
class EngineFields:
    """The settings as they were given. `EngineConfig` checks them."""

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
    weight_cache: bool = field(
        default=True,
        metadata={"help": "on CPU: keep packed weights in the user's cache folder, for a faster next start"},
    )
    enable_cuda_graphs: bool = field(
        default=True,
        metadata={"help": "on CUDA: record decode steps as CUDA graphs in the background and replay them"},
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
    heartbeat_timeout_s: float = field(
        default=20.0,
        metadata={
            "help": "a core in another process that sends nothing for so long is ended and started again; one that "
            "still uses the processor gets a minute"
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
            "short_flag": "-tp",
            "help": "number of ranks (1, 2, 4 or 8) that divide the matrices of one model, on this machine; each has "
            "its CUDA device, or its share of the CPU's cores",
        },
    )
    pipeline_parallel_size: int = field(
        default=1,
        metadata={
            "short_flag": "-pp",
            "help": "number of stages that divide the layers of one model, on this machine, each with "
            "tensor_parallel_size ranks; as many batches run at a time",
        },
    )
    decode_context_parallel_size: int = field(
        default=1,
        metadata={
            "short_flag": "-dcp",
            "help": "number of ranks (1, 2, 4 or 8) that divide the keys and values of each request, so that longer "
            "contexts fit, on CPU; tensor_parallel_size must be a multiple of it times the model's KV heads",
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
            "help": "number of this machine, from 0; node 0 serves, the others only compute, with the same flags"
        },
    )
    master_addr: str = field(
        default="127.0.0.1",
        metadata={"help": "address of node 0, on which the ranks of other nodes connect to it"},
    )
    master_port: int = field(default=29501, metadata={"help": "port of node 0 for the ranks of other nodes"})
    distributed_executor_backend: ParallelBackend = field(
        default="mp",
        metadata={
            "help": "who starts the other nodes: mp: you, with node_rank; ray: Ray, on the cluster of RAY_ADDRESS"
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
            "help": "what starts the replicas: mp: this server and --headless; ray: Ray, on the cluster of RAY_ADDRESS"
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
        default=None, metadata={"help": "with --headless: number of this replica, from 0"}
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
