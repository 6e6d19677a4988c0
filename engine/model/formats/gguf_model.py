"""The models of GGUF files under the names that the loader knows: their config, their tensors and their end tokens."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.model.formats.encoded import EncodedTensor
from engine.model.formats.gguf_blocks import GGUFTensor
from engine.model.formats.gguf_file import GGUFFile

_SAMPLE_BYTES = 4096
_ROPE_FACTORS = "rope_freqs.weight"
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_TABLES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Metadata below the architecture's name -> field of config.json.
_FIELDS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
    "attention.sliding_window": "sliding_window",
}
# Fields that others repeat, and those that are read by themselves.
_OTHER_FIELDS = ("vocab_size", "rope.dimension_count", "attention.value_length", "rope.scaling.")


@dataclass(frozen=True, slots=True)
class _Architecture:
    name: str  # in config.json
    # Rows of queries and keys are stored with the two values that RoPE rotates side by side.
    is_interleaved: bool = False


_ARCHITECTURES = {
    "llama": _Architecture("LlamaForCausalLM", is_interleaved=True),
    "qwen2": _Architecture("Qwen2ForCausalLM"),
    "qwen3": _Architecture("Qwen3ForCausalLM"),
}


class GGUFModel:
    """A GGUF file as a checkpoint.

    Raises:
        ConfigError: as `GGUFFile`, or an architecture or setting that is not supported.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = GGUFFile(path)
        self._metadata = self._file.metadata
        self._name = self._metadata.get("general.architecture")
        if self._name not in _ARCHITECTURES:
            known = ", ".join(_ARCHITECTURES)
            raise ConfigError(
                f"{path}: general.architecture={self._name!r} is not supported; supported: {known}"
            )
        self._architecture = _ARCHITECTURES[self._name]

    def make_config(self) -> dict[str, Any]:
        """Return what config.json would contain; unknown settings keep their names, so that they are refused."""
        names = set(self._file.names)
        if "token_embd.weight" not in names:
            raise ConfigError(f"{self._file.path}: the tensor token_embd.weight is missing")
        config: dict[str, Any] = {
            "architectures": [self._architecture.name],
            "vocab_size": self._file.shape("token_embd.weight")[0],
            "tie_word_embeddings": "output.weight" not in names,
            "quantization_config": {"quant_method": "gguf", "has_int4": self._file.has_int4},
        }
        if self._name == "llama":
            config["attention_bias"] = "blk.0.attn_q.bias" in names
            config["mlp_bias"] = "blk.0.ffn_up.bias" in names
        prefix = f"{self._name}."
        for key, value in self._metadata.items():
            field = key.removeprefix(prefix)
            if key.startswith(prefix) and not field.startswith(_OTHER_FIELDS):
                config[_FIELDS.get(field, key)] = value
        if scaling := self._read_scaling():
            config["rope_scaling"] = scaling
        return config

    def read_tensors(self) -> Iterator[tuple[str, Tensor | EncodedTensor]]:
        """Yield each tensor under the name that it has in safetensors; unknown ones keep theirs."""
        for name in self._file.names:
            if name != _ROPE_FACTORS:
                yield self._translate(name), self._arrange(name, self._file.read(name))

    def read_end_tokens(self) -> list[int]:
        """Return the ids that end a text, as far as the file names them."""
        keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
        return [self._metadata[key] for key in keys if key in self._metadata]

    def hash_weights(self) -> bytes:
        """Return a hash of the header, the size, and the first and last 4 KiB of each tensor."""
        found = hashlib.sha256(f"{self._file.path.name}:{self._file.path.stat().st_size}:".encode())
        with self._file.path.open("rb") as file:
            found.update(file.read(self._file.header_bytes))
            for name in self._file.names:
                for start in self._file.find_ends(name, _SAMPLE_BYTES):
                    file.seek(start)
                    found.update(file.read(_SAMPLE_BYTES))
        return found.digest()

    def _translate(self, name: str) -> str:
        if name in _TABLES:
            return _TABLES[name]
        found = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
        if found is None or found[2] not in _PARTS:
            return name
        return f"model.layers.{found[1]}.{_PARTS[found[2]]}.{found[3]}"

    def _arrange(self, name: str, tensor: Tensor | GGUFTensor) -> Tensor | EncodedTensor:
        """Undo the order of rows that some architectures have in GGUF."""
        is_query, is_key = ".attn_q." in name, ".attn_k." in name
        if not self._architecture.is_interleaved or not (is_query or is_key):
            return tensor
        # The config was read before, so the number of heads is there.
        num_heads: int = self._metadata[f"{self._name}.attention.head_count"]
        if is_key:
            num_heads = self._metadata.get(f"{self._name}.attention.head_count_kv", num_heads)
        order = torch.arange(tensor.shape[0]).view(num_heads, -1, 2).transpose(1, 2).flatten()
        return tensor.select_rows(order) if isinstance(tensor, GGUFTensor) else tensor[order]

    def _read_scaling(self) -> dict[str, Any] | None:
        prefix = f"{self._name}.rope.scaling."
        scaling = {
            key.removeprefix(prefix): value for key, value in self._metadata.items() if key.startswith(prefix)
        }
        if _ROPE_FACTORS in self._file.names:
            return self._read_llama3()
        kind = scaling.get("type", "none")
        if kind == "none":
            return None
        found = {"rope_type": kind, "factor": scaling.get("factor")}
        if kind == "yarn":
            found["original_max_position_embeddings"] = scaling.get("original_context_length")
        return found

    def _read_llama3(self) -> dict[str, Any]:
        """Recover the settings from the factors that the file holds instead of them."""
        factors = self._file.read(_ROPE_FACTORS)
        assert isinstance(factors, Tensor), "the factors are one-dimensional"
        base = self._metadata.get(f"{self._name}.rope.freq_base", 10000.0)
        frequencies = base ** (-torch.arange(len(factors), dtype=torch.float64) / len(factors))
        # How often an angle turns within the original context, between the two limits.
        turns = _LLAMA3["original_max_position_embeddings"] * frequencies / (2 * torch.pi)
        low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
        share = ((turns - low) / (high - low)).clamp(0, 1)
        factor = float(factors.max())
        expected = 1 / ((1 - share) / factor + share)
        if not torch.allclose(expected.float(), factors.float(), rtol=1e-3):
            raise ConfigError(f"{self._file.path}: {_ROPE_FACTORS} does not have the factors of Llama 3")
        return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
