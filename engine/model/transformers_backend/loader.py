"""Reads config and weights of a checkpoint for the transformers backend.

The files are read by transformers' own loader, which knows the names of every family's tensors. No code of a
checkpoint is run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from engine.errors import ConfigError
from engine.host_memory import map_large_blocks
from engine.model.checkpoint import hash_weights, resolve_weights, weight_files
from engine.model.implementation import EncoderConfig, TransformersConfig
from engine.model.rope_config import RopeConfig
from engine.model.transformers_backend import encoder, packed_experts, paged_interface
from engine.model.transformers_backend.leak_probe import probe
from engine.model.transformers_backend.model import Skeleton, TransformersModel, find_auto_class, make_model
from engine.model.transformers_backend.paged_interface import UnsupportedModel
from engine.model.weight_targets import list_names
from kernels import Ops

_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_DTYPES = ("float32", "bfloat16", "float16")
# RoPE types whose angles transformers chooses by the longest row of a step.
_BATCH_ROPE = ("dynamic", "longrope")


def read_config(folder: Path, data: Mapping[str, Any] | None = None) -> TransformersConfig:
    """Read config.json, trace the model on the meta device and probe a tiny model of its kind."""
    config = _read_source(folder, data)
    try:
        _check(config)
        probe(config)
        skeleton = Skeleton(config)
    except UnsupportedModel as error:
        name = getattr(config, "model_type", "?")
        raise ConfigError(
            f"{folder}: model_type {name!r} cannot run on the transformers backend: {error}"
        ) from error
    return _make_config(config, skeleton, str(folder / "config.json"))


def read_encoder_config(folder: Path, data: Mapping[str, Any]) -> EncoderConfig:
    """Read the config.json of an encoder."""
    return encoder.make_config(_read_source(folder, data), str(folder / "config.json"))


def _read_source(folder: Path, data: Mapping[str, Any] | None) -> PreTrainedConfig:
    try:
        with TemporaryDirectory() as made:
            source = folder
            if data is not None:
                source = Path(made)
                (source / "config.json").write_text(json.dumps(data), encoding="utf-8")
            return transformers.AutoConfig.from_pretrained(  # type: ignore[no-any-return]
                source, local_files_only=True, trust_remote_code=False
            )
    except (ValueError, KeyError, OSError, TypeError, StrictDataclassError) as error:
        raise ConfigError(f"{folder / 'config.json'}: transformers cannot read it: {error}") from error


def load(
    path_or_name: str | Path, config: TransformersConfig, dtype: torch.dtype, device: torch.device,
    ops: Ops | None, seed: int | None = None,
) -> TransformersModel | encoder.EncoderModel:
    """Build the model with the weights of the checkpoint, not packed yet.

    Args:
        seed: draw random weights instead of reading any.

    Raises:
        ConfigError: the tensors do not match the config.
    """
    if isinstance(config, EncoderConfig):
        map_large_blocks(encoder.REUSED_BYTES)
    if seed is not None:
        with torch.random.fork_rng(devices=[]), torch.device(device):
            torch.manual_seed(seed)
            if isinstance(config, EncoderConfig):
                source = encoder.build(config.source, config.num_labels)
            else:
                source = make_model(config.source)
        nn.Module.to(source, dtype)
        weights_hash = b"dummy:%d" % seed
    else:
        folder = resolve_weights(path_or_name)
        source = _read_weights(folder, config, dtype, device)
        weights_hash = hash_weights(weight_files(folder))
    source.eval().requires_grad_(False)
    model: TransformersModel | encoder.EncoderModel
    if isinstance(config, EncoderConfig):
        model = encoder.EncoderModel(source, config, ops)
    else:
        model = TransformersModel(source, config.skeleton, config, ops)
    model.weights_hash = weights_hash
    return model.eval()


def _read_weights(
    folder: Path, config: TransformersConfig, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    source = config.source
    if isinstance(config, EncoderConfig):
        factory = encoder.find_auto_class(config.num_labels)
        source, options = encoder.prepare_read(source)
    else:
        paged_interface.register()
        packed_experts.register()
        factory = find_auto_class(source)
        options = {"attn_implementation": paged_interface.NAME, "experts_implementation": packed_experts.NAME}
    try:
        model, report = factory.from_pretrained(
            folder, config=source, dtype=dtype, use_safetensors=True, local_files_only=True,
            trust_remote_code=False, output_loading_info=True, **options,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{folder} cannot be loaded by transformers: {error}") from error
    if isinstance(config, EncoderConfig):
        report = {
            what: [name for name in names if not encoder.is_spare(str(name), config)] for what, names in report.items()
        }
    wrong = {what: names for what, names in report.items() if names}
    if wrong:
        shown = "; ".join(f"{what}: {list_names(names)}" for what, names in sorted(wrong.items()))
        raise ConfigError(f"the tensors of {folder} do not match its config: {shown}")
    nn.Module.to(model, device)
    return model  # type: ignore[no-any-return]


def _check(config: PreTrainedConfig) -> None:
    """Refuse configs that the paged cache cannot serve."""
    if config.model_type.startswith("gemma3n"):
        raise UnsupportedModel("Gemma 3n is not run: in chunks, its logits differ by 4e-5 from those of a whole prompt")
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModel("quantization_config: quantized checkpoints are not supported by this backend")
    if config.is_encoder_decoder:
        raise UnsupportedModel("it has an encoder beside its decoder")
    text = config.get_text_config()
    kinds = {
        each for name in ("layer_types", "layers_block_type") for each in getattr(text, name, None) or ()
    }
    if foreign := sorted(kinds - _LAYER_TYPES - {"attention"}):
        raise UnsupportedModel(
            f"layer_types has {', '.join(foreign)}; only {' and '.join(sorted(_LAYER_TYPES))} can share a paged cache"
        )


def _make_config(config: PreTrainedConfig, skeleton: Skeleton, where: str) -> TransformersConfig:
    text = config.get_text_config()
    max_len = getattr(text, "max_position_embeddings", None)
    if not isinstance(max_len, int) or max_len < 1:
        raise ConfigError(f"{where}: max_position_embeddings={max_len!r} must be an integer of at least 1")
    limit, notices = _find_rope_limit(text, max_len), []
    if limit < max_len:
        notices.append(
            f"at most {limit} tokens on the transformers backend: longer RoPE would depend on the batch"
        )
    calls = skeleton.calls.values()
    heads, kv_heads = max((call.num_heads, call.num_kv_heads) for call in calls)
    hidden = int(text.hidden_size)
    inner = getattr(text, "intermediate_size", None) or 4 * hidden
    name = (config.architectures or [type(config).__name__])[0]
    return TransformersConfig(
        architecture=name,
        vocab_size=int(text.vocab_size),
        hidden_size=hidden,
        intermediate_size=max(inner) if isinstance(inner, list) else int(inner),
        num_hidden_layers=len(skeleton.calls),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=max(call.head_size for call in calls),
        max_position_embeddings=limit,
        rope=RopeConfig(),
        tie_word_embeddings=skeleton.is_tied,
        sliding_windows=tuple(call.window for call in calls),
        dtype=_read_dtype(config, text),
        num_parameters=skeleton.num_parameters,
        source=config,
        skeleton=skeleton,
        notices=tuple(notices),
    )


def _read_dtype(config: PreTrainedConfig, text: PreTrainedConfig) -> str:
    name = str(text.dtype or config.dtype or "float32").removeprefix("torch.")
    return name if name in _DTYPES else "float32"


def _find_rope_limit(text: Any, max_len: int) -> int:
    """Return the length up to which the angles of RoPE do not depend on other requests."""
    found = getattr(text, "rope_parameters", None) or {}
    kinds = [found, *(each for each in found.values() if isinstance(each, dict))]
    limits = [
        each.get("original_max_position_embeddings")
        or getattr(text, "original_max_position_embeddings", None)
        or max_len
        for each in kinds
        if each.get("rope_type") in _BATCH_ROPE
    ]
    return min([max_len, *limits])
