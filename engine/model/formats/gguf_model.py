"""The models of GGUF files under the names that the loader knows: their config, their tensors and their end tokens."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.model.formats.encoded import EncodedTensor
from engine.model.formats.gguf_blocks import GGUFTensor
from engine.model.formats.gguf_config import ARCHITECTURES, Metadata, make_config
from engine.model.formats.gguf_file import GGUFFile, Strings

_SAMPLE_BYTES = 4096
_FREQUENCIES = "rope_freqs.weight"
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# Factors of RoPE, which are read into the config.
_ROPE_TENSORS = (_FREQUENCIES, "rope_factors_long.weight", "rope_factors_short.weight")
_END_KEYS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
# Many files name one token only, such as the end of a document.
_END_TOKENS = (
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<turn|>", "<|endoftext|>"),
    *("<|end_of_text|>", "<|return|>", "<|call|>", "<|END_OF_TURN_TOKEN|>", "<end_of_utterance>", "<EOT>", "[EOT]"),
    *("<｜end▁of▁sentence｜>", "[e~["),
)
_TABLES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "token_embd_norm": "model.norm",  # in LFM2, after the last layer
    "output": "lm_head",
}
# Names of a layer's tensors -> names of our modules, which are transformers' names for Llama and its like.
_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_sinks": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_experts_gate",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_MAMBA_PARTS = {
    "ssm_in": "mamba.in_proj", "ssm_out": "mamba.out_proj", "ssm_conv1d": "mamba.conv1d",
    "ssm_norm": "mamba.norm", "ssm_a": "mamba.A_log", "ssm_d": "mamba.D", "ssm_dt": "mamba.dt_bias",
}
_DELTA_PARTS = {
    "attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a", "ssm_beta": "linear_attn.in_proj_b",
    "ssm_out": "linear_attn.out_proj", "ssm_conv1d": "linear_attn.conv1d", "ssm_norm": "linear_attn.norm",
    "ssm_a": "linear_attn.A_log", "ssm_dt": "linear_attn.dt_bias",
}
_LATENT_PARTS = {
    "attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_layernorm", "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",  # in older files; newer ones have attn_k_b and attn_v_b
}
_FURTHER_PARTS = {
    "gemma2": {"ffn_norm": "pre_feedforward_layernorm"}, "gemma3": {"ffn_norm": "pre_feedforward_layernorm"},
    "starcoder2": {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}, "granitehybrid": _MAMBA_PARTS,
    "deepseek2": _LATENT_PARTS, "qwen3next": _DELTA_PARTS, "qwen35": _DELTA_PARTS, "qwen35moe": _DELTA_PARTS,
}
_SCALARS = ("A_log", "D", "dt_bias", "e_score_correction_bias", "sinks")  # names without .weight or .bias

Piece = Tensor | GGUFTensor


class GGUFModel:
    """A GGUF file as a checkpoint, its tensors under the names of our modules.

    Raises:
        ConfigError: as `GGUFFile`, or an architecture or setting that is not supported.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = GGUFFile(path)
        name = self._file.metadata.get("general.architecture")
        if name not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise ConfigError(f"{path}: general.architecture={name!r} is not supported; supported: {known}")
        self._name: str = name
        self._parts = _PARTS | _FURTHER_PARTS.get(name, {})
        self._config: dict[str, Any] = {}

    def make_config(self) -> dict[str, Any]:
        """Return what config.json would contain; unknown settings keep their names, so that they are refused."""
        shapes = {name: self._file.shape(name) for name in self._file.names}
        if "token_embd.weight" not in shapes:
            raise ConfigError(f"{self._file.path}: the tensor token_embd.weight is missing")
        metadata = Metadata(self._name, self._file.metadata, shapes, str(self._file.path))
        config = make_config(ARCHITECTURES[self._name], metadata)
        if self._file.is_encoded:
            config["quantization_config"] = {"quant_method": "gguf"}
        if "rope_factors_long.weight" in shapes:
            for kind in ("long", "short"):
                factors = self._file.read(f"rope_factors_{kind}.weight")
                assert isinstance(factors, Tensor), "the factors are one-dimensional"
                config["rope_scaling"][f"{kind}_factor"] = factors.tolist()
        elif _FREQUENCIES in shapes:
            config["rope_scaling"] = self._read_llama3(config.get("rope_theta", 10000.0))
        return config

    def read_tensors(self, hold: Callable[[Tensor], None]) -> Iterator[tuple[str, Tensor | EncodedTensor]]:
        """Yield each tensor under the name of our module; unknown ones keep theirs.

        `hold` is called with the mapped files first: the tensors are views of them.
        """
        for mapped in self._file.maps:
            hold(mapped)
        self._config = self.make_config()
        for name in self._file.names:
            if name not in _ROPE_TENSORS:
                yield from self._read(name)

    def read_end_tokens(self) -> list[int]:
        """Return the ids that end a text: those that the file names, and special tokens that end a turn of a chat."""
        metadata = self._file.metadata
        ids = [metadata[key] for key in _END_KEYS if key in metadata]
        tokens, kinds = (metadata.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
        if not isinstance(tokens, Strings) or not isinstance(kinds, list):
            return ids
        names = {at: name for at, name in enumerate(self._file.read_strings(tokens)) if name in _END_TOKENS}
        if "<|return|>" in names.values():  # gpt-oss ends its messages, not its turn, with <|end|>
            names = {at: name for at, name in names.items() if name != "<|end|>"}
        return ids + [at for at in names if at < len(kinds) and kinds[at] == gguf.TokenType.CONTROL]

    def hash_weights(self) -> bytes:
        """Return a hash of the metadata, and of each tensor's name, shape, and first and last 4 KiB."""
        found = hashlib.sha256(self._file.header_hash)
        for name in self._file.names:
            found.update(
                f"{name}:{self._file.shape(name)}:".encode() + self._file.sample(name, _SAMPLE_BYTES)
            )
        return found.digest()

    def _read(self, name: str) -> Iterator[tuple[str, Tensor | EncodedTensor]]:
        """Yield the matrices of one tensor of the file."""
        tensor = self._file.read(name)
        found = re.fullmatch(r"(?:blk\.(\d+)\.)?([\w.]+?)(?:\.(weight|bias))?", name)
        layer, part, kind = found.groups() if found else (None, "", None)
        if layer is None:
            yield (f"{_TABLES[part]}.{kind}" if part in _TABLES else name), tensor
            return
        prefix = f"model.layers.{layer}"
        if part == "attn_k_b":  # [heads, rank, keys]; their values are beside them, [heads, values, rank]
            halves = tensor, self._file.read(f"blk.{layer}.attn_v_b.weight")
            keys, values = (torch.stack([_decode(head) for head in _unbind(half)]) for half in halves)
            yield f"{prefix}.self_attn.kv_b_proj.weight", torch.cat((keys.transpose(1, 2), values), dim=1).flatten(0, 1)
            return
        if part == "attn_v_b" and self._name == "deepseek2":
            return
        if part in _EXPERTS:
            for expert, matrix in enumerate(_unbind(tensor)):
                yield f"{prefix}.mlp.experts.{expert}.{_EXPERTS[part]}.{kind}", matrix
            return
        if (pieces := self._split(part, tensor)) is not None:
            for target, piece in pieces.items():
                yield f"{prefix}.{target}.{kind}", piece
            return
        if part not in self._parts:
            yield name, tensor
            return
        end = "" if self._parts[part].endswith(_SCALARS) else f".{kind}"
        yield f"{prefix}.{self._parts[part]}{end}", self._arrange(part, tensor)

    def _split(self, part: str, tensor: Piece) -> dict[str, Piece] | None:
        """Return the matrices that a file stores as one; None for other tensors."""
        config = self._config
        if self._name == "phi3" and part == "attn_qkv":
            size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
            keys = config["num_key_value_heads"] * size
            sizes = [config["num_attention_heads"] * size, keys, keys]
            names = [f"self_attn.{each}_proj" for each in "qkv"]
        elif self._name == "phi3" and part == "ffn_up":
            sizes = [config["intermediate_size"]] * 2
            names = ["mlp.gate_proj", "mlp.up_proj"]
        elif part == "ssm_ba":  # of each group of heads first all of beta, then all step sizes
            groups = config["linear_num_key_heads"]
            order = torch.arange(tensor.shape[0]).view(groups, 2, -1).transpose(0, 1).flatten()
            tensor = _select_rows(tensor, order)
            sizes = [tensor.shape[0] // 2] * 2
            names = ["linear_attn.in_proj_b", "linear_attn.in_proj_a"]
        else:
            return None
        rows = torch.arange(tensor.shape[0]).split(sizes)
        return {name: _select_rows(tensor, part) for name, part in zip(names, rows, strict=True)}

    def _arrange(self, part: str, tensor: Piece) -> Piece | EncodedTensor:
        """Undo what the converter has changed in a tensor."""
        if part in ("attn_q", "attn_k") and ARCHITECTURES[self._name].is_interleaved:
            key = "num_attention_heads" if part == "attn_q" else "num_key_value_heads"
            num_heads = self._config.get(key) or self._config["num_attention_heads"]
            order = torch.arange(tensor.shape[0]).view(num_heads, -1, 2).transpose(1, 2).flatten()
            return _select_rows(tensor, order)
        if part == "ssm_a":
            tensor = _decode(tensor).neg().log()
        if part in ("ssm_conv1d", "shortconv.conv") and len(tensor.shape) == 2:
            tensor = _decode(tensor).unsqueeze(1)
        if self._name.startswith("qwen35") and part in _DELTA_PARTS:
            return self._group_heads(part, tensor)
        if part in ("ssm_a", "ssm_d", "ssm_norm"):
            return _decode(tensor).flatten()
        return tensor

    def _group_heads(self, part: str, tensor: Piece) -> Piece | EncodedTensor:
        """Put the heads of Qwen3.5's values beside those of their keys; the file has the first of each key first."""
        config = self._config
        keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
        size = config["linear_value_head_dim"]
        heads = torch.arange(values).view(values // keys, keys).t().flatten()
        rows = (heads.unsqueeze(1) * size + torch.arange(size)).flatten()
        if part == "ssm_out":
            return _decode(tensor)[:, rows]
        if part in ("ssm_a", "ssm_dt", "ssm_alpha", "ssm_beta"):
            return _select_rows(tensor, heads)
        if part in ("attn_qkv", "ssm_conv1d"):
            first = tensor.shape[0] - len(rows)  # queries and keys are before the values
            rows = torch.cat((torch.arange(first), first + rows))
        return tensor if part == "ssm_norm" else _select_rows(tensor, rows)

    def _read_llama3(self, base: float) -> dict[str, Any]:
        """Recover the settings from the factors that the file holds instead of them."""
        factors = self._file.read(_FREQUENCIES)
        assert isinstance(factors, Tensor), "the factors are one-dimensional"
        frequencies = base ** (-torch.arange(len(factors), dtype=torch.float64) / len(factors))
        # How often an angle turns within the original context, between the two limits.
        turns = _LLAMA3["original_max_position_embeddings"] * frequencies / (2 * torch.pi)
        low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
        share = ((turns - low) / (high - low)).clamp(0, 1)
        factor = float(factors.max())
        expected = 1 / ((1 - share) / factor + share)
        if not torch.allclose(expected.float(), factors.float(), rtol=1e-3):
            raise ConfigError(f"{self._file.path}: {_FREQUENCIES} does not have the factors of Llama 3")
        return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def _decode(tensor: Piece) -> Tensor:
    return tensor.dequantize() if isinstance(tensor, GGUFTensor) else tensor


def _select_rows(tensor: Piece, order: Tensor) -> Piece:
    return tensor.select_rows(order) if isinstance(tensor, GGUFTensor) else tensor[order]


def _unbind(tensor: Piece) -> Iterator[Piece]:
    """Yield the matrices, or vectors, of all experts."""
    if isinstance(tensor, Tensor):
        yield from tensor
        return
    num_experts, *shape = tensor.shape
    for rows in tensor.rows.chunk(num_experts):
        yield GGUFTensor(tensor.kind, rows, torch.Size(shape))
