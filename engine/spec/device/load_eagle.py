"""Loads EAGLE-1 and EAGLE-3 layers, from the formats of their authors, SpecForge and speculators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.model import Model, ModelConfig
from engine.model.implementation import TransformersConfig
from engine.model.layer_spec import LayerSpec
from engine.spec.device.checkpoint import copy_tensors, read_head_folder
from engine.spec.device.eagle import Eagle
from engine.spec.device.eagle_net import EagleNet, EagleShape
from kernels import Ops

# Keys of config.json that are read here, or describe the training.
_OWN_KEYS = frozenset(
    [
        *("architectures", "bias", "draft_vocab_size", "target_hidden_size", "eagle_config", "norm_output"),
        *("norm_before_residual", "eagle_aux_hidden_state_layer_ids", "base_model_name_or_path", "auto_map"),
        *("target_model_type", "num_aux_hidden_states", "tie_word_embeddings", "layer_types"),
        *("max_window_layers", "use_sliding_window", "sliding_window"),
    ]
)  # fmt: skip
_UNSUPPORTED = ("fc_norm", "norm_before_fc", "parallel_drafting")
_FLAGS = ("norm_before_residual", "norm_output")


def load_eagle(
    path_or_name: str, target: Model, ops: Ops, *, is_eagle3: bool, is_greedy: bool, device: torch.device
) -> Eagle:
    """Build the layer for a target model and load its weights.

    Raises:
        ConfigError: the checkpoint does not fit the target, or contains what cannot be placed.
    """
    if isinstance(target.config, TransformersConfig):
        raise ConfigError(
            f"speculative_config: method={'eagle3' if is_eagle3 else 'eagle'!r} needs a target of our decoder, and "
            "this one runs on transformers' code; use draft_model, ngram or suffix"
        )
    config, tensors = read_head_folder(path_or_name)
    tensors = {_rename(name): tensor for name, tensor in tensors.items()}
    if "speculators_model_type" in config:
        config = _read_speculators(config, path_or_name)
    nested = config.get("eagle_config") or {}
    settings = {**config, **nested}
    for name in _UNSUPPORTED:
        if settings.get(name):
            raise ConfigError(f"{path_or_name}: {name}={settings[name]!r} is not supported")
    layer = _parse_layer(config, path_or_name)
    size = target.config.hidden_size
    if not is_eagle3 and layer.hidden_size != size:
        raise ConfigError(f"{path_or_name}: hidden_size={layer.hidden_size} differs from the target's {size}")
    aux_layers = _find_aux_layers(config, nested, target.config.num_hidden_layers) if is_eagle3 else ()
    shape = EagleShape(
        layer=layer,
        is_eagle3=is_eagle3,
        num_aux_layers=len(aux_layers),
        target_hidden_size=size,
        has_fc_bias="fc.bias" in tensors,
        has_input_norm="layers.0.input_layernorm.weight" in tensors,
        draft_vocab_size=int(settings.get("draft_vocab_size") or target.config.vocab_size)
        if is_eagle3
        else 0,
        norm_before_residual=bool(settings.get("norm_before_residual")),
        norm_output=bool(settings.get("norm_output")),
    )
    embedding = _choose_embedding(tensors, target, layer.hidden_size, path_or_name).to(device, target.dtype)
    net = EagleNet(shape, embedding, ops, target.dtype, device).eval()
    ignored = ("embed_tokens.weight", "d2t", "t2d", "mask_hidden")
    copy_tensors(net.weight_targets(), tensors, path_or_name, ignored)
    net.pack(ops)
    token_map = _read_token_map(tensors, shape, target.config.vocab_size, path_or_name)
    return Eagle(net, target, None if token_map is None else token_map.to(device), aux_layers, is_greedy)


def _rename(name: str) -> str:
    """Return the name without a prefix of the whole model; EAGLE-3 calls its layer `midlayer`."""
    name = name.removeprefix("model.")
    return name.replace("midlayer.", "layers.0.", 1) if name.startswith("midlayer.") else name


def _read_speculators(config: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the layer's config with the settings that stand beside it."""
    kind, inner = config["speculators_model_type"], config.get("transformer_layer_config")
    if kind not in ("eagle", "eagle3") or not isinstance(inner, dict):
        raise ConfigError(
            f"{where}: speculators_model_type={kind!r} is not supported; supported: eagle, eagle3"
        )
    return {**inner, **{name: config[name] for name in (*_OWN_KEYS, *_UNSUPPORTED) if name in config}}


def _parse_layer(config: dict[str, Any], where: str) -> LayerSpec:
    """Return the layer's shape. Its `max_position_embeddings` does not limit the RoPE table, which grows."""
    kept = {name: value for name, value in config.items() if name not in (*_OWN_KEYS, *_UNSUPPORTED)}
    parsed = ModelConfig.from_dict({**kept, "num_hidden_layers": 1}, f"{where}/config.json")
    if parsed.rope.rope_type == "dynamic":
        raise ConfigError(f"{where}: dynamic RoPE is not supported in a draft layer")
    if parsed.style.placement != "pre":
        raise ConfigError(f"{where}: norms after the parts of a draft layer are not supported")
    return replace(parsed.layer_specs[0], window=None)


def _find_aux_layers(config: dict[str, Any], nested: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """Return the target's layers whose inputs the draft layer reads.

    At the top level the ids name inputs of layers; in `eagle_config` they name outputs, as SpecForge writes them.
    """
    name = "eagle_aux_hidden_state_layer_ids"
    if (ids := config.get(name)) is not None:
        found = _read_ids(ids, name)
    elif (ids := nested.get(name)) is not None:
        found = tuple(each + 1 for each in _read_ids(ids, name))
    else:
        found = (2, num_layers // 2, num_layers - 3)
    if any(not 0 <= each <= num_layers for each in found) or list(found) != sorted(set(found)):
        raise ConfigError(f"{name}: {list(found)} must be ascending and between 0 and {num_layers}")
    return found


def _read_ids(ids: object, name: str) -> tuple[int, ...]:
    if not isinstance(ids, Sequence) or not ids or not all(type(each) is int for each in ids):
        raise ConfigError(f"{name}={ids!r} must be a list of layer numbers")
    return tuple(ids)


def _choose_embedding(tensors: dict[str, Tensor], target: Model, size: int, where: str) -> Tensor:
    own = tensors.get("embed_tokens.weight")
    embedding = target.unpack_embedding() if own is None else own
    expected = (target.config.vocab_size, size)
    if tuple(embedding.shape) != expected:
        whose = (
            "embed_tokens.weight" if own is not None else "the target's embedding, in place of a missing one,"
        )
        raise ConfigError(f"{where}: {whose} has shape {list(embedding.shape)}, expected {list(expected)}")
    return embedding.detach()


def _read_token_map(
    tensors: dict[str, Tensor], shape: EagleShape, vocab_size: int, where: str
) -> Tensor | None:
    """Return the target's token of each output. `d2t` contains offsets: token = output + d2t[output]."""
    if not shape.is_eagle3 or "d2t" not in tensors:
        if shape.is_eagle3 and shape.draft_vocab_size > vocab_size:
            raise ConfigError(
                f"{where}: draft_vocab_size={shape.draft_vocab_size} exceeds the target's {vocab_size}"
            )
        return None
    offsets = tensors["d2t"].long()
    token_map = torch.arange(len(offsets)) + offsets
    is_inside = len(offsets) == shape.draft_vocab_size and bool(
        ((token_map >= 0) & (token_map < vocab_size)).all()
    )
    if not is_inside:
        raise ConfigError(
            f"{where}: d2t must map {shape.draft_vocab_size} outputs to tokens below {vocab_size}"
        )
    return token_map
