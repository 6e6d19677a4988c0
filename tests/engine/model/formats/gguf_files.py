"""Writes GGUF files for the tests with the package `gguf`; it cannot round to Q4_K, so that is done here."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from transformers import PreTrainedModel

from engine.model.checkpoint import read_tensors, weight_files

ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}


def round_q4_k(weight: np.ndarray) -> np.ndarray:
    """Return the blocks of a matrix [out, in] with in divisible by 256: bytes [out, in / 256 * 144]."""
    groups = weight.reshape(-1, 8, 32)
    low = np.minimum(groups.min(axis=2), 0)
    step = (groups.max(axis=2) - low) / 15
    d = (step.max(axis=1, keepdims=True) / 63).astype(np.float16)
    dmin = (-low.min(axis=1, keepdims=True) / 63).astype(np.float16)
    scales, minimums = (
        np.rint(values / np.maximum(unit.astype(np.float32), 1e-20)).clip(0, 63).astype(np.uint8)
        for values, unit in ((step, d), (-low, dmin))
    )
    real_scales = np.maximum((d.astype(np.float32) * scales)[..., None], 1e-20)
    real_minimums = (dmin.astype(np.float32) * minimums)[..., None]
    codes = np.rint((groups + real_minimums) / real_scales).clip(0, 15).astype(np.uint8).reshape(-1, 4, 2, 32)
    packed = np.concatenate(
        [
            scales[:, :4] | (scales[:, 4:] >> 4) << 6, minimums[:, :4] | (minimums[:, 4:] >> 4) << 6,
            scales[:, 4:] & 15 | (minimums[:, 4:] & 15) << 4,
        ],
        axis=1,
    )
    nibbles = (codes[:, :, 0] | codes[:, :, 1] << 4).reshape(-1, 128)
    blocks = np.concatenate([d.view(np.uint8), dmin.view(np.uint8), packed, nibbles], axis=1)
    return blocks.reshape(len(weight), -1)


def encode(weight: np.ndarray, kind: Type) -> np.ndarray:
    return round_q4_k(weight) if kind == Type.Q4_K else gguf.quants.quantize(weight, kind)


def write_gguf(
    folder: Path, target: Path, kinds: dict[str, Type], metadata: dict[str, Any] | None = None
) -> dict[str, torch.Tensor]:
    """Write a checkpoint folder as a GGUF file; returns the weights as they are after decoding, by their names.

    Args:
        kinds: how tensors are stored whose names contain the key; "" stands for all other matrices.
        metadata: further entries, strings, integers, floats or lists of strings.
    """
    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(target, gguf.MODEL_ARCH_NAMES[architecture])
    add_sizes(writer, config)
    for key, value in (metadata or {}).items():
        add_value(writer, key, value)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    decoded = {}
    for name, tensor in read_tensors(weight_files(folder)):
        array = interleave(name, tensor.float(), config).numpy()
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        kind = next((kinds[part] for part in kinds if part and part in name), kinds[""])
        if array.ndim == 1 or kind == Type.F32:
            writer.add_tensor(found, array)
            decoded[name] = tensor.float()
            continue
        data = encode(array, kind)
        writer.add_tensor(found, data, raw_dtype=kind)
        values = torch.from_numpy(gguf.quants.dequantize(data, kind).copy())
        decoded[name] = interleave(name, values, config, back=True)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    return decoded


def interleave(name: str, tensor: torch.Tensor, config: dict[str, Any], back: bool = False) -> torch.Tensor:
    """The order of the rows of Llama's queries and keys in GGUF."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config.get("num_key_value_heads")}
    num_heads = next((count for part, count in heads.items() if part in name), None)
    if config["model_type"] != "llama" or num_heads is None:
        return tensor
    parts = tensor.unflatten(0, (num_heads, -1, 2) if back else (num_heads, 2, -1))
    return parts.transpose(1, 2).reshape(tensor.shape)


def load_reference(model: PreTrainedModel, decoded: dict[str, torch.Tensor]) -> PreTrainedModel:
    """Put decoded weights into a model of transformers."""
    missing, unexpected = model.load_state_dict(decoded, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    return model.float()


def add_sizes(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)
