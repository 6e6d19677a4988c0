"""Writes a checkpoint in Hugging Face format that `Qwen3ForCausalLM.from_pretrained` loads."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from .growth import count_layers
from .model import ModelShape
from .tokenizer import save_tokenizer

END_OF_TURN, PADDING = 2, 0


def make_config(shape: ModelShape) -> dict[str, object]:
    """The `config.json` of the shape."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "dtype": "bfloat16",
        "eos_token_id": END_OF_TURN,
        "head_dim": shape.head_size,
        "hidden_act": "silu",
        "hidden_size": shape.width,
        "initializer_range": 0.02,
        "intermediate_size": shape.mlp_width,
        "layer_types": ["full_attention"] * shape.num_layers,
        "max_position_embeddings": shape.context,
        "max_window_layers": shape.num_layers,
        "model_type": "qwen3",
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_kv_heads,
        "pad_token_id": PADDING,
        "rms_norm_eps": shape.norm_eps,
        "rope_parameters": {"rope_theta": shape.rope_base, "rope_type": "default"},
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": shape.vocabulary_size,
    }


def measure_shape(weights: dict[str, Tensor]) -> ModelShape:
    """The shape of a decoder with these weights; what no weight tells is as it always is."""
    vocabulary_size, width = weights["embed_tokens.weight"].shape
    head_size = len(weights["layers.0.self_attn.q_norm.weight"])
    return ModelShape(
        num_layers=count_layers(weights),
        width=width,
        num_heads=len(weights["layers.0.self_attn.q_proj.weight"]) // head_size,
        num_kv_heads=len(weights["layers.0.self_attn.k_proj.weight"]) // head_size,
        head_size=head_size,
        mlp_width=len(weights["layers.0.mlp.gate_proj.weight"]),
        vocabulary_size=vocabulary_size,
    )


def export_checkpoint(
    weights: dict[str, Tensor],
    shape: ModelShape,
    tokenizer: Tokenizer,
    folder: Path,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write weights, configuration and tokenizer into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    named = {f"model.{name}": weight.detach().to(dtype).contiguous() for name, weight in weights.items()}
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    generation = {
        "eos_token_id": [END_OF_TURN],
        "pad_token_id": PADDING,
        "do_sample": False,
        "use_cache": True,
    }
    (folder / "config.json").write_text(json.dumps(make_config(shape), indent=2) + "\n", encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
    save_tokenizer(tokenizer, folder)


def average_states(states: Sequence[Path]) -> dict[str, Tensor]:
    """The mean of the weights that training states would export, in float32 by name.

    Each phase of falling rate ends near another best point; the mean of two such ends reads documents of other
    kinds better than either (Wortsman et al., 2022, Model soups).

    Raises:
        ValueError: a state has other weights than the first.
    """
    found = [_read_means(path) for path in states]
    shapes = [{name: tensor.shape for name, tensor in weights.items()} for weights in found]
    for path, other in zip(states, shapes, strict=True):
        if other != shapes[0]:
            raise ValueError(f"{path} holds other weights than {states[0]}")
    return {name: torch.stack([weights[name] for weights in found]).mean(0) for name in found[0]}


def _read_means(path: Path) -> dict[str, Tensor]:
    prefix = "mean."
    state = load_file(path)
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Export a training state as a Hugging Face checkpoint.")
    parser.add_argument(
        "--state", type=Path, nargs="+", required=True, help="state.safetensors of a run; the mean of several"
    )
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json of the run")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.tokenizer))
    weights = average_states(args.state)
    export_checkpoint(weights, measure_shape(weights), tokenizer, args.out)


if __name__ == "__main__":
    main()
