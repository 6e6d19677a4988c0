"""A checkpoint in Hugging Face format as a GGUF file, for the peer that reads nothing else.

Written with the optional package `gguf`; the names, the layout and the rounding are its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig

from app.config import UsageError

ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen3": gguf.MODEL_ARCH.QWEN3}
BLOCK = 32  # values that share a scale


def write_gguf(folder: Path, target: Path, kind: Kind) -> None:
    """Write the weights of a folder with config.json and safetensors; there is no tokenizer in the file.

    Args:
        kind: of every matrix: F32, F16, BF16, Q8_0 or Q4_0. Vectors stay float32.

    Raises:
        UsageError: neither Llama nor Qwen3, or something in it that GGUF has no name for.
    """
    shape: Any = AutoConfig.from_pretrained(folder)
    if shape.model_type not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UsageError(f"--peer llama.cpp: model_type {shape.model_type!r} is not one of {known}")
    architecture = ARCHITECTURES[shape.model_type]
    writer = gguf.GGUFWriter(target, gguf.MODEL_ARCH_NAMES[architecture], use_temp_file=True)
    _describe(writer, shape)
    names = gguf.get_tensor_name_map(architecture, shape.num_hidden_layers)
    for name, tensor in _read_tensors(folder):
        if name == "lm_head.weight" and shape.tie_word_embeddings:
            continue
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise UsageError(f"--peer llama.cpp: GGUF has no place for the tensor {name}")
        if shape.model_type == "llama":
            tensor = _interleave(name, tensor, shape)
        _add_tensor(writer, found, tensor, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _read_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UsageError(f"--peer llama.cpp: {folder} has no safetensors")
    for path in files:
        with safe_open(path, framework="pt") as reader:
            for name in reader.keys():  # noqa: SIM118  it is no dict
                yield name, reader.get_tensor(name)


def _head_dim(shape: Any) -> int:
    return getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads


def _describe(writer: gguf.GGUFWriter, shape: Any) -> None:
    """The sizes, and that there is no vocabulary but ids."""
    rope = shape.rope_parameters
    if rope.get("rope_type", "default") != "default":
        raise UsageError(f"--peer llama.cpp: rope_type {rope['rope_type']!r} is not supported, only 'default'")
    head_dim = _head_dim(shape)
    writer.add_context_length(shape.max_position_embeddings)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_block_count(shape.num_hidden_layers)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_attention_heads)
    writer.add_head_count_kv(shape.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(shape.rms_norm_eps)
    writer.add_vocab_size(shape.vocab_size)
    writer.add_tokenizer_model("none")


def _interleave(name: str, tensor: Tensor, shape: Any) -> Tensor:
    """Rows of queries and keys as Llama has them in GGUF: the two values that RoPE rotates stand side by side."""
    if ".q_proj." in name:
        num_heads = shape.num_attention_heads
    elif ".k_proj." in name:
        num_heads = shape.num_key_value_heads
    else:
        return tensor
    halves = tensor.view(num_heads, 2, _head_dim(shape) // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


def _add_tensor(writer: gguf.GGUFWriter, name: str, tensor: Tensor, kind: Kind) -> None:
    if tensor.dim() == 1 or kind == Kind.F32:
        writer.add_tensor(name, tensor.float().numpy())
    elif kind == Kind.F16:
        writer.add_tensor(name, tensor.half().numpy())
    elif kind == Kind.BF16:
        # numpy has no bfloat16: the bytes as they are
        writer.add_tensor(name, tensor.bfloat16().contiguous().view(torch.uint8).numpy(), raw_dtype=kind)
    else:
        if tensor.shape[1] % BLOCK:
            raise UsageError(
                f"--peer llama.cpp: {name} has {tensor.shape[1]} columns; {kind.name} needs a multiple of {BLOCK}"
            )
        writer.add_tensor(name, gguf.quants.quantize(tensor.float().numpy(), kind), raw_dtype=kind)
