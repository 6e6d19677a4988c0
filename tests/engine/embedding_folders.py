"""Tiny checkpoints that say how embeddings are made, and one under the name of a reranker."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as RustTokenizer
from transformers import PreTrainedModel

from tests.engine.model.drive import make_transformers_model, save
from tests.engine.tokenizer_folders import make_byte_level_folder

MODULES = ["Transformer", "Pooling", "Normalize"]


def make_embedding_folder(
    folder: Path, mode: str = "lasttoken", modules: list[str] = MODULES, **keys: Any
) -> PreTrainedModel:
    """Write a tiny Qwen3 without its output head, as embedding models are saved; `keys` go into config.json."""
    make_byte_level_folder(folder)
    model = make_model(folder)
    base = model.model
    base.config.architectures = ["Qwen3ForCausalLM"]
    save(base, folder)
    config = json.loads((folder / "config.json").read_text()) | keys
    config["architectures"] = ["Qwen3ForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    places = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize", "Dense": "2_Dense"}
    listed = [{"path": places[name], "type": f"sentence_transformers.models.{name}"} for name in modules]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    flags = {f"pooling_mode_{name}": name == mode for name in ("cls_token", "mean_tokens", "lasttoken")}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 48} | flags))
    return model


def make_reranker_folder(folder: Path) -> PreTrainedModel:
    """Write a tiny Qwen3 whose tokenizer has the tokens of Qwen3-Reranker's template, yes and no."""
    make_byte_level_folder(folder)
    tokenizer = RustTokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(["yes", "no"])
    tokenizer.save(str(folder / "tokenizer.json"))
    model = make_model(folder)
    save(model, folder)
    return model


def make_model(folder: Path) -> PreTrainedModel:
    tokenizer = RustTokenizer.from_file(str(folder / "tokenizer.json"))
    return make_transformers_model(
        "qwen3", vocab_size=tokenizer.get_vocab_size(), tie_word_embeddings=True, eos_token_id=1
    )


def compute_hidden(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """Return transformers' final hidden states, [n, 48]."""
    with torch.inference_mode():
        return model.model(torch.tensor([token_ids]), use_cache=False).last_hidden_state[0]
