"""Random adapters in PEFT's format, on all matrices of attention and MLP, for benchmarks."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from app.bench.settings import read_model_config
from engine import EngineConfig, LoRARequest


def write_adapters(folder: Path, config: EngineConfig, count: int, rank: int) -> list[LoRARequest]:
    """Write adapters of a model with Llama's matrices, and return how requests select them."""
    model = read_model_config(config)
    hidden, inner, num_heads = model["hidden_size"], model["intermediate_size"], model["num_attention_heads"]
    head_dim = model.get("head_dim") or hidden // num_heads
    q_size, kv_size = num_heads * head_dim, model.get("num_key_value_heads", num_heads) * head_dim
    sizes = {
        "self_attn.q_proj": (hidden, q_size),
        "self_attn.k_proj": (hidden, kv_size),
        "self_attn.v_proj": (hidden, kv_size),
        "self_attn.o_proj": (q_size, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
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
