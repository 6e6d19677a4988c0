"""Chooses the code that runs a checkpoint: our decoder for the families it knows, else transformers' code.

The modules of the transformers backend are imported by name, because importing transformers' models takes seconds.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.config_fields import ModelImpl
from engine.errors import ConfigError
from engine.model.checkpoint import NO_OVERRIDES, override, read_json_object, resolve_checkpoint
from engine.model.config import ModelConfig, add_head
from engine.model.families import FAMILIES
from engine.model.families.text_parts import TEXT_PARTS
from engine.model.formats.gguf_file import is_gguf

ENCODERS = ("bert", "roberta", "xlm-roberta", "camembert", "modernbert")  # and gemma3_text if it looks both ways
_CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification", "ForRewardModel")
_BACKEND = "engine.model.transformers_backend.loader"


@dataclass(frozen=True, slots=True)
class TransformersConfig(ModelConfig):
    """The sizes of the model, as far as the engine needs them, and the objects to build it from.

    `head_dim` and the numbers of heads are the largest of all layers.
    """

    num_parameters: int = 0
    source: Any = None  # transformers' config
    # A Skeleton of engine.model.transformers_backend.
    skeleton: Any = field(default=None, compare=False, repr=False)
    notices: tuple[str, ...] = ()  # log messages about limits of the backend


@dataclass(frozen=True, slots=True)
class EncoderConfig(TransformersConfig):
    """The sizes of a model that makes no text: vectors of texts, or scores of pairs of them."""

    num_labels: int = 0  # of its classifier; 0: it has none
    first_position: int = 0  # of a text
    has_token_types: bool = False  # whether the second text of a pair is marked

    @property
    def refusal(self) -> str:
        """The answer to who asks it for text."""
        does = "scores pairs of texts: use /rerank or /score"
        if not self.num_labels:
            does = "makes embeddings: use /v1/embeddings, or /rerank and /score, which compare them"
        return f"this model is an encoder and generates no text; it {does}"


def read_model_config(
    path_or_name: str | Path, model_impl: ModelImpl = "auto", overrides: Mapping[str, Any] = NO_OVERRIDES
) -> ModelConfig:
    """Read the config of a checkpoint for the implementation that will run it.

    Args:
        model_impl: auto: our decoder if it knows the architecture, else transformers.
    """
    if is_gguf(path_or_name):
        if model_impl == "transformers":
            raise ConfigError("model_impl='transformers' does not read GGUF files; use auto")
        return ModelConfig.from_pretrained(path_or_name, overrides)
    folder = resolve_checkpoint(path_or_name, ("config.json",))
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} is not a checkpoint: it has no config.json")
    data = override(read_json_object(folder / "config.json"), overrides)
    if model_impl != "troupe" and _is_encoder(data):
        return import_backend().read_encoder_config(folder, data)  # type: ignore[no-any-return]
    if any(str(name).endswith(_CLASSIFIERS) for name in data.get("architectures") or ()):
        raise ConfigError(
            f"{folder / 'config.json'}: architectures={data['architectures']!r}: a decoder that classifies is not "
            "supported; encoders that classify are, and decoders that generate or make embeddings"
        )
    if model_impl == "troupe" or (model_impl == "auto" and _is_native(data)):
        return ModelConfig.from_dict(data, str(folder / "config.json"))
    return import_backend().read_config(folder, data if overrides else None)  # type: ignore[no-any-return]


def _is_encoder(data: dict[str, Any]) -> bool:
    kind = data.get("model_type")
    return kind in ENCODERS or (kind == "gemma3_text" and bool(data.get("use_bidirectional_attention")))


def _is_native(data: dict[str, Any]) -> bool:
    """Whether our decoder knows the architecture in a config.json, or the model type if there is none."""
    if (part := TEXT_PARTS.get(str(data.get("model_type")))) is not None:
        text = data.get("text_config")
        if part.architecture:
            return True
        if not isinstance(text, dict):
            return True  # ModelConfig refuses it with a reason
        data = text
    architectures = data.get("architectures") or []
    if isinstance(architectures, list) and architectures:
        return add_head(architectures[0]) in FAMILIES
    return data.get("model_type") in {family.model_type for family in FAMILIES.values()}


def import_backend() -> Any:
    """Return the module that reads configs and weights for transformers' code."""
    return importlib.import_module(_BACKEND)
