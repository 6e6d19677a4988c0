"""`bench throughput`: many requests, offline, as fast as possible.

python -m app bench throughput --num-prompts 200 --input-len 128 --output-len 128
python -m app bench throughput --shape qwen3-0.6b --dtype bfloat16 --num-loras 8 --num-iters 3
python -m app bench throughput --work nano --scale 0.1 --shape qwen3-0.6b --dtype bfloat16 --structured
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file

from app.bench.runners import TroupeRunner
from app.bench.settings import (
    add_engine_flags,
    as_settings,
    engine_settings,
    fit,
    read_model_config,
    write_json,
)
from app.bench.spread import Spread, ratio
from app.bench.workload import add_number, add_random_flags, count_tokens, read_work
from engine import EngineConfig, LoRARequest
from grammar import GrammarSpec

# A schema that does not end within the work's lengths: an array of records whose values end, so that a random model
# meets every kind of mask.
RECORDS = {
    "type": "array",
    "minItems": 10**4,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 8, "maxLength": 16},
            "count": {"type": "integer", "minimum": 0, "maximum": 9999},
        },
        "required": ["name", "count"],
        "additionalProperties": False,
    },
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add vLLM's flags, and those that compare constrained with free output."""
    add_random_flags(parser, num=100, input_len=128, output_len=128)
    add_number(parser, "--num-iters", 1, 1, 1000, "repeats")
    add_number(parser, "--temperature", 0.6, 0, 2, "sampling temperature")
    parser.add_argument(
        "--structured", action="store_true", help="repeat the measurement with a JSON schema on every row"
    )
    add_number(parser, "--num-loras", 0, 0, 1024, "repeat the measurement with this many random adapters, in turn")
    add_number(parser, "--lora-rank", 16, 1, 4096, "rank of the random adapters")
    add_engine_flags(parser)


def run(arguments: argparse.Namespace, start: float) -> int:
    """Measure and print."""
    with engine_settings(arguments, max_num_seqs=256, max_num_batched_tokens=2048) as config:
        write_json(arguments.output_json, config, measure_all(arguments, config))
    return 0


def measure_all(arguments: argparse.Namespace, config: EngineConfig) -> dict[str, Any]:
    """Run the work free, then structured if asked; return the figures."""
    jobs = read_work(arguments, read_model_config(config)["vocab_size"])
    num_in, num_out = count_tokens(jobs)
    longest = max(len(job.prompt_token_ids) + job.max_tokens for job in jobs)
    config = fit(config, len(jobs), min(num_in + num_out, config.find_step_limits("cuda")[0] * longest), longest)
    settings = as_settings(config)
    runners = {"free": TroupeRunner(settings, None, arguments.temperature)}
    folder = TemporaryDirectory()
    if arguments.num_loras:
        adapters = write_adapters(Path(folder.name), config, arguments.num_loras, arguments.lora_rank)
        lora = {"enable_lora": True, "max_loras": max(arguments.num_loras, config.max_loras)}
        lora["max_lora_rank"] = max(arguments.lora_rank, config.max_lora_rank)
        runners["adapters"] = TroupeRunner(settings | lora, None, arguments.temperature, adapters)
    if arguments.structured:
        grammar = GrammarSpec.json_schema(RECORDS)
        runners["structured"] = TroupeRunner(settings, grammar, arguments.temperature)
    times: dict[str, list[float]] = {name: [] for name in runners}
    try:
        for runner in runners.values():
            runner.run(jobs[:2])
        for _ in range(arguments.num_iters):
            for name, runner in runners.items():
                times[name].append(runner.run(jobs))
    finally:
        for runner in runners.values():
            runner.close()
        folder.cleanup()
    print(f"{len(jobs)} requests, {num_in} tokens in, {num_out} tokens out")
    figures: dict[str, Any] = {"num_requests": len(jobs), "num_in": num_in, "num_out": num_out, "elapsed_s": times}
    rates = {name: Spread(tuple(num_out / spent for spent in found)) for name, found in times.items()}
    for name, rate in rates.items():
        spent = Spread(tuple(times[name]))
        print(
            f"{name:12}{len(jobs) / spent.median:10.2f} requests/s{(num_in + num_out) / spent.median:12.1f} total tok/s"
            f"   {rate} output tok/s"
        )
    if arguments.num_loras:
        share = ratio(rates["adapters"], rates["free"])
        print(f"with {arguments.num_loras} adapters over without {share}")
        figures["adapters_over_free"] = share.values
    if arguments.structured:
        share = ratio(rates["structured"], rates["free"])
        print(f"structured over free {share}")
        figures["structured_over_free"] = share.values
    return figures


def write_adapters(folder: Path, config: EngineConfig, count: int, rank: int) -> list[LoRARequest]:
    """Write adapters of a model with Llama's matrices, and return how requests select them."""
    model = read_model_config(config)
    hidden, inner, num_heads = model["hidden_size"], model["intermediate_size"], model["num_attention_heads"]
    head_dim = model.get("head_dim") or hidden // num_heads
    q_size, kv_size = num_heads * head_dim, model.get("num_key_value_heads", num_heads) * head_dim
    sizes = {
        "self_attn.q_proj": (hidden, q_size), "self_attn.k_proj": (hidden, kv_size),
        "self_attn.v_proj": (hidden, kv_size), "self_attn.o_proj": (q_size, hidden),
        "mlp.gate_proj": (hidden, inner), "mlp.up_proj": (hidden, inner), "mlp.down_proj": (inner, hidden),
    }
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(sizes)}
    found = []
    for number in range(count):
        generator, tensors = torch.Generator().manual_seed(number), {}
        for layer in range(model["num_hidden_layers"]):
            for name, (num_in, num_out) in sizes.items():
                prefix = f"base_model.model.model.layers.{layer}.{name}"
                for part, shape in (("lora_A", (rank, num_in)), ("lora_B", (num_out, rank))):
                    drawn = torch.randn(shape, generator=generator) * 0.01
                    tensors[f"{prefix}.{part}.weight"] = drawn.bfloat16()
        target = folder / str(number)
        target.mkdir()
        save_file(tensors, target / "adapter_model.safetensors")
        (target / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
        found.append(LoRARequest(f"adapter {number}", number + 1, str(target)))
    return found
