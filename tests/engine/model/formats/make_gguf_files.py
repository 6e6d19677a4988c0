"""Makes the files of `test_gguf_families.py`: a tiny random model of each family, as llama.cpp's converter writes it.

PYTHONPATH=LLAMA_CPP/gguf-py:LLAMA_CPP python -m tests.engine.model.formats.make_gguf_files [NAME...]

LLAMA_CPP is a source tree of llama.cpp, whose own package `gguf` is newer than the published one. Beside the files it
writes the logits that transformers computes with the same weights.
"""

import importlib
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from tests.engine.model.drive import compute_expected, make_transformers_model

FOLDER = Path(__file__).with_name("gguf")
LOGITS = FOLDER / "logits.npz"
VOCAB_SIZE = 32
PROMPT = [(7 * position + 3) % (VOCAB_SIZE - 1) + 1 for position in range(40)]
SHAPE: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 64}
SHAPE |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
WINDOW = {"sliding_window": 24, "num_hidden_layers": 4}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 5e3}
MSCALE = {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LONGROPE = {"rope_type": "longrope", "rope_theta": 5e3, "partial_rotary_factor": 0.75}
LONGROPE |= {"short_factor": [1.0, 1.1, 1.2, 1.4, 1.5, 2.0], "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 31.0]}
LOCAL = {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 9e3}}
GRANITE = {"embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22}
GRANITE |= {"attention_multiplier": 0.1}
FEW = {"num_local_experts": 4, "num_experts_per_tok": 2}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
DELTA = {"linear_value_head_dim": 32, "linear_key_head_dim": 16, "num_hidden_layers": 4}
MAMBA = {"mamba_n_heads": 2, "layer_types": ["linear_attention", "full_attention"], "shared_intermediate_size": 64}
CONV = {"layer_types": ["conv", "full_attention"]}
# Name of the file -> family of `drive.py` and further config.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-3.1": ("llama", {"rope_parameters": LLAMA3, "attention_bias": True, "tie_word_embeddings": True}),
    "mixtral": ("mixtral", FEW),
    "ministral3": ("ministral3", {"rope_parameters": YARN | MSCALE}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "qwen2_moe": ("qwen2_moe", EXPERTS | {"shared_expert_intermediate_size": 32}),
    "qwen3_moe": ("qwen3_moe", EXPERTS),
    "qwen3_next": ("qwen3_next", EXPERTS | DELTA | {"shared_expert_intermediate_size": 32}),
    "qwen3_5": ("qwen3_5", DELTA),
    "qwen3_5_moe": ("qwen3_5_moe", EXPERTS | DELTA | {"shared_expert_intermediate_size": 32}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4}),
    "granite": ("granite", GRANITE),
    "granitemoe": ("granitemoe", GRANITE | FEW | {"head_dim": 16}),
    "granite4": ("granitemoehybrid", MAMBA | {"layer_types": ["attention"] * 2}),
    "granite4h": ("granite4h", MAMBA | GRANITE | {"mamba_n_groups": 1}),
    "granite4h_moe": ("granite4h_moe", MAMBA | GRANITE | FEW),
    "bamba": ("bamba", {"attn_layer_indices": [1], "mamba_n_heads": 2, "head_dim": 16}),
    "phi3": ("phi3", {"sliding_window": 24}),
    "phi3-longrope": (
        "phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32, "max_position_embeddings": 128},
    ),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", WINDOW | {"rope_parameters": LOCAL}),
    "olmoe": ("olmoe", {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2}),
    "exaone4": ("exaone4", WINDOW),
    "gemma2": ("gemma2", WINDOW | {"attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 16}),
    "gemma3": ("gemma3", WINDOW | {"num_hidden_layers": 6, "query_pre_attn_scalar": 16}),
    "cohere2": ("cohere2", WINDOW),
    "seed_oss": ("seed_oss", {"attention_out_bias": True}),
    "starcoder2": ("starcoder2", {}),
    "lfm2": ("lfm2", CONV | {"head_dim": 16}),
    "lfm2_moe": ("lfm2_moe", CONV | EXPERTS | {"head_dim": 16}),
    "gpt_oss": (
        "gpt_oss",
        FEW | {"swiglu_limit": 7.0, "sliding_window": 24, "rope_parameters": YARN | {"truncate": False}},
    ),
    "glm4_moe": ("glm4_moe", EXPERTS | {"n_routed_experts": 4, "use_qk_norm": True, "attention_bias": True}),
    "minimax_m2": ("minimax_m2", FEW),
}


def complete_config(family: str, config: dict[str, Any]) -> dict[str, Any]:
    """Write fields as published checkpoints have them, and as the converter reads them."""
    if family.startswith("granite") and "layer_types" in config:
        kinds = {"linear_attention": "mamba", "full_attention": "attention"}
        config["layer_types"] = [kinds.get(each, each) for each in config["layer_types"]]
        if family == "granitemoehybrid":
            del config["num_experts_per_tok"]
    if family == "bamba":
        config["attn_rotary_emb"] = 8
    if family == "cohere2":
        config["rotary_pct"] = 1.0
    if family == "minimax_m2":
        config["rotary_dim"] = 8
    return config


def convert(converter: Any, target: Path, family: str, overrides: dict[str, Any]) -> np.ndarray:
    """Write one file; returns the logits, [tokens, vocabulary]."""
    model = make_transformers_model(family, **SHAPE | overrides)
    for parameter in model.parameters():
        parameter.copy_(parameter.half())  # the file has 16 bits
    with TemporaryDirectory() as name:
        folder = Path(name)
        model.save_pretrained(folder)
        path = folder / "config.json"
        path.write_text(json.dumps(complete_config(family, json.loads(path.read_text()))))
        vocabulary = {f"t{index}": index for index in range(VOCAB_SIZE)}
        tokenizer = {"model": {"vocab": vocabulary}, "added_tokens": []}
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        base = importlib.import_module("conversion.base")
        fields = base.ModelBase.load_hparams(folder, False)
        kind = converter.get_model_class(base.get_model_architecture(fields, base.ModelType.TEXT))
        kind.no_mtp = True
        for each in kind.__mro__:
            for method in ("set_vocab", "_set_vocab_sentencepiece", "_set_vocab_gpt2", "_set_vocab_mistral"):
                if method in each.__dict__:
                    setattr(each, method, set_vocab)
        gguf = importlib.import_module("gguf")
        with torch.inference_mode():
            kind(folder, gguf.LlamaFileType.MOSTLY_F16, target, eager=True).write()
    return compute_expected(model, PROMPT).numpy()


def set_vocab(self: Any) -> None:
    writer = self.gguf_writer
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"t{index}".encode() for index in range(VOCAB_SIZE)])
    writer.add_token_types([1] * VOCAB_SIZE)
    writer.add_eos_token_id(2)


def main() -> None:
    names = sys.argv[1:]
    converter = importlib.import_module("conversion")
    FOLDER.mkdir(exist_ok=True)
    logits = dict(np.load(LOGITS)) if LOGITS.exists() else {}
    for name in names or MODELS:
        logits[name] = convert(converter, FOLDER / f"{name}.gguf", *MODELS[name])
        np.savez_compressed(LOGITS, **logits)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
