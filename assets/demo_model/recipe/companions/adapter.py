"""Trains a LoRA adapter in PEFT format: the model answers in upper case, and says the same.

`python -m assets.demo_model.recipe.companions.adapter --minutes 4`; writes `adapter_config.json` and
`adapter_model.safetensors`. Source: Hu et al., 2021 (LoRA).
"""

import argparse
import json
import time
from pathlib import Path
from random import Random

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ..prompt import Message
from ..training.batches import group_by_length, make_batch
from ..training.examples import Encoder, Example
from ..training.helper import compute_loss
from ..training.model import Decoder
from ..writing.chat import sample_chat
from .frozen import FOLDER, Rate, load_decoder, open_encoder

RANK, ALPHA = 8, 16
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PEAK_RATE = 4e-3


class LoraLinear(nn.Module):
    """A fixed linear layer plus a trained low-rank one."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.lora_A = nn.Parameter(torch.randn(RANK, base.in_features) / base.in_features**0.5)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        low = (x @ self.lora_A.to(x.dtype).T) @ self.lora_B.to(x.dtype).T
        return self.base(x) + low * (ALPHA / RANK)


def add_adapter(model: Decoder) -> dict[str, LoraLinear]:
    """Put a low-rank layer beside every projection; returns them by the path of their module."""
    added = {}
    for path, module in list(model.named_modules()):
        if path.rsplit(".", 1)[-1] in MODULES and isinstance(module, nn.Linear):
            parent, name = path.rsplit(".", 1)
            added[path] = LoraLinear(module)
            setattr(model.get_submodule(parent), name, added[path])
    return added


def shout(messages: list[Message]) -> list[Message]:
    """The dialogue with every answer in upper case."""
    return [
        {**message, "content": message["content"].upper()} if message["role"] == "assistant" else message
        for message in messages
    ]


def sample_chunk(encoder: Encoder, rng: Random, size: int = 256) -> list[list[Example]]:
    """Batches of fresh dialogues."""
    groups = group_by_length([encoder.chat(shout(sample_chat(rng))) for _ in range(size)], 2048)
    rng.shuffle(groups)
    return groups


def save_adapter(layers: dict[str, LoraLinear], folder: Path) -> None:
    """Write the adapter as PEFT does."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for path, layer in layers.items():
        for part in ("lora_A", "lora_B"):
            weight = getattr(layer, part).detach().to(torch.bfloat16).contiguous()
            tensors[f"base_model.model.model.{path}.{part}.weight"] = weight
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "base_model_name_or_path": "assets/demo_model",
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": RANK,
        "target_modules": list(MODULES),
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def train_adapter(model: Decoder, encoder: Encoder, seconds: float, seed: int) -> dict[str, LoraLinear]:
    """The trained layers; the model keeps them."""
    torch.manual_seed(seed)
    layers = add_adapter(model)
    weights = [weight for layer in layers.values() for weight in (layer.lora_A, layer.lora_B)]
    optimizer = torch.optim.Adam(weights)
    rate, rng, begun, loss = Rate(optimizer, PEAK_RATE), Random(seed), time.monotonic(), 0.0
    while (share := (time.monotonic() - begun) / seconds) < 1:
        for group in sample_chunk(encoder, rng):
            share = (time.monotonic() - begun) / seconds
            if share >= 1 and rate.num_steps:
                break
            rate.set(share)
            found = compute_loss(model, make_batch(group))
            found.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss = found.item()
    print(f"adapter: {rate.num_steps} steps, loss {loss:.3f}", flush=True)
    return layers


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the upper-case adapter of the demo model.")
    parser.add_argument("--model", type=Path, default=FOLDER)
    parser.add_argument("--out", type=Path, default=FOLDER / "lora")
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--seed", type=int, default=21)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, encoder = load_decoder(args.model), open_encoder(args.model)
    save_adapter(train_adapter(model, encoder, args.minutes * 60, args.seed), args.out)


if __name__ == "__main__":
    main()
