"""Reads from a checkpoint's files how its hidden states become an embedding. What they do not say is refused.

modules.json              sentence-transformers' Transformer, Pooling, Dense, and Normalize if vectors have length 1
1_Pooling/config.json     last token, mean, or first token (cls)
2_Dense/                  a matrix for the pooled vector, such as the two of EmbeddingGemma, and an activation
config.json               the lengths to which vectors may be cut (matryoshka)

A GGUF file has `pooling_type`; its vectors have length 1.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import ConfigError, InvalidRequest
from engine.model.checkpoint import read_json_object, read_tensors, resolve_checkpoint
from engine.model.formats.gguf_file import GGUFFile, is_gguf
from engine.sampling_params import PoolingKind

_PATTERNS = (
    *("modules.json", "*/config.json", "*_Dense/model.safetensors", "config.json"),
    *("sentence_bert_config.json", "config_sentence_transformers.json"),
)
# Older files have a flag per mode; newer ones have `pooling_mode`.
_FLAGS: dict[str, PoolingKind] = {
    "pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls",
}
_MODES: dict[str, PoolingKind] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
_GGUF_KINDS: dict[Any, PoolingKind] = {1: "mean", 2: "cls", 3: "last"}


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """y = activation(W x + b) of a vector, float32."""

    weight: np.ndarray  # [out, in]
    bias: np.ndarray | None  # [out]
    is_tanh: bool  # else there is no activation

    def apply(self, vector: np.ndarray) -> np.ndarray:
        """Return the layer's output for one vector, alone: a product of several would have other bits."""
        y: np.ndarray = self.weight @ vector
        if self.bias is not None:
            y = y + self.bias
        return np.tanh(y) if self.is_tanh else y


@dataclass(frozen=True, slots=True)
class EmbeddingSpec:
    """How a checkpoint makes embeddings."""

    kind: PoolingKind
    is_normalized: bool  # vectors are scaled to length 1
    prompt: str = ""  # put before every text
    max_tokens: int | None = None  # longest text; None: as the model
    is_lowered: bool = False  # texts are written in lower case first
    lengths: tuple[int, ...] | None = None  # lengths to which vectors may be cut; (): any; None: none
    layers: tuple[DenseLayer, ...] = field(default=(), repr=False)  # of the pooled vector, in order

    def finish(self, pooled: np.ndarray, dimensions: int | None) -> np.ndarray:
        """Return the embedding of a text, [dimensions] float32, from its pooled hidden states."""
        for layer in self.layers:
            pooled = layer.apply(pooled)
        vector = pooled[:dimensions]
        if not self.is_normalized:
            return vector
        length = float(np.linalg.norm(vector.astype(np.float64)))
        return (vector / max(length, 1e-12)).astype(np.float32)

    def check_layers(self, size: int) -> None:
        """Check that each layer takes what the one before gives; the first one hidden states of this size.

        Raises:
            ConfigError: names the sizes.
        """
        for number, layer in enumerate(self.layers, 1):
            if layer.weight.shape[1] != size:
                raise ConfigError(f"Dense module {number} takes {layer.weight.shape[1]} numbers, and gets {size}")
            size = len(layer.weight)

    def check_dimensions(self, dimensions: int, size: int) -> None:
        """Check the length that a request wants its vectors cut to.

        Args:
            size: of the hidden states.

        Raises:
            InvalidRequest: names the allowed lengths, or the key that the model's files lack.
        """
        size = len(self.layers[-1].weight) if self.layers else size
        if self.lengths is None:
            if dimensions == size:
                return
            raise InvalidRequest(
                f"dimensions={dimensions}: the model's config.json has neither matryoshka_dimensions nor "
                f"is_matryoshka, so its vectors keep {size} numbers",
                "dimensions",
            )
        allowed = f"one of {', '.join(map(str, self.lengths))}" if self.lengths else f"from 1 to {size}"
        if not 1 <= dimensions <= size or (self.lengths and dimensions not in self.lengths):
            raise InvalidRequest(f"dimensions={dimensions} must be {allowed}", "dimensions")


def read_embedding_spec(path_or_name: str | Path) -> EmbeddingSpec:
    """Read the files of a folder or of a repository on the hub, or the metadata of a GGUF file."""
    if is_gguf(path_or_name):
        return _read_gguf(GGUFFile(path_or_name))
    folder = resolve_checkpoint(path_or_name, _PATTERNS)
    try:
        return _read_spec(folder)
    except ConfigError as error:
        # clients of a server read the message, and need not know its folders
        reason = str(error).replace(f"{folder}/", "").replace(str(folder), "the checkpoint")
        raise ConfigError(reason) from None


def read_activation(path_or_name: str | Path) -> bool:
    """Whether the scores of a cross-encoder are sigmoids of its logits: by default, as in sentence-transformers."""
    data = read_json_object(resolve_checkpoint(path_or_name, ("config.json",)) / "config.json")
    settings = data.get("sentence_transformers")
    named = settings.get("activation_fn") if isinstance(settings, dict) else None
    named = str(named or data.get("sbert_ce_default_activation_function") or "Sigmoid").rpartition(".")[2]
    if named not in ("Sigmoid", "Identity"):
        raise ConfigError(f"config.json: the activation {named} is not supported; Sigmoid and Identity are")
    return named == "Sigmoid"


def _read_gguf(file: GGUFFile) -> EmbeddingSpec:
    key = f"{file.metadata.get('general.architecture')}.pooling_type"
    if (kind := file.metadata.get(key)) not in _GGUF_KINDS:
        raise ConfigError(f"{file.path.name}: {key} is {kind}; 1 (mean), 2 (cls) or 3 (last token) is supported")
    return EmbeddingSpec(_GGUF_KINDS[kind], is_normalized=True)


def _read_spec(folder: Path) -> EmbeddingSpec:
    modules = _read_modules(folder)
    places = dict(modules)
    pooling = folder / places["Pooling"] / "config.json"
    bert = _read_if_present(folder / places["Transformer"] / "sentence_bert_config.json")
    max_tokens = bert.get("max_seq_length")
    return EmbeddingSpec(
        kind=_read_kind(pooling),
        is_normalized="Normalize" in places,
        prompt=_read_prompt(folder / "config_sentence_transformers.json"),
        max_tokens=max_tokens if isinstance(max_tokens, int) else None,
        is_lowered=bert.get("do_lower_case") is True,
        lengths=_read_lengths(folder / "config.json"),
        layers=tuple(_read_dense(folder / place) for name, place in modules if name == "Dense"),
    )


def _read_modules(folder: Path) -> list[tuple[str, str]]:
    """Return class name and folder of each module, in order."""
    path = folder / "modules.json"
    if not path.is_file():
        raise ConfigError(f"{folder} has no modules.json, so it does not say how embeddings are made")
    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
        places = [(str(each["type"]).rpartition(".")[2], str(each["path"])) for each in modules]
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path} must be a list of modules with type and path: {error!r}") from error
    names = [name for name, _ in places]
    layers = ["Dense"] * names.count("Dense")
    if names not in (parts := ["Transformer", "Pooling", *layers], [*parts, "Normalize"]):
        raise ConfigError(
            f"{path} has the modules {', '.join(names)}; Transformer, Pooling, Dense and Normalize are supported, in "
            "this order"
        )
    if any(Path(place).is_absolute() or ".." in Path(place).parts for _, place in places):
        raise ConfigError(f"{path}: a path of a module must be inside the folder")
    return places


def _read_dense(folder: Path) -> DenseLayer:
    data = read_json_object(folder / "config.json")
    name = str(data.get("activation_function", "Tanh")).rpartition(".")[2]
    if name not in ("Tanh", "Identity"):
        raise ConfigError(f"{folder}/config.json: the activation {name} is not supported; Tanh and Identity are")
    file = folder / "model.safetensors"
    if not file.is_file():
        raise ConfigError(f"{file} is missing; weights of a Dense module are read from safetensors only")
    tensors = {name: tensor.float().numpy().copy() for name, tensor in read_tensors([file])}
    wanted: dict[str, tuple[Any, ...]] = {"linear.weight": (data.get("out_features"), data.get("in_features"))}
    if data.get("bias", True):
        wanted["linear.bias"] = (data.get("out_features"),)
    found = {name: tensor.shape for name, tensor in tensors.items()}
    if found != wanted:
        raise ConfigError(f"{file} has the tensors {found}; its config.json says {wanted}")
    return DenseLayer(tensors["linear.weight"], tensors.get("linear.bias"), name == "Tanh")


def _read_kind(path: Path) -> PoolingKind:
    if not path.is_file():
        raise ConfigError(f"{path} is missing, so the checkpoint does not say how hidden states are pooled")
    data = read_json_object(path)
    mode = data.get("pooling_mode")
    modes = (
        [mode]
        if mode is not None
        else [key for key, on in data.items() if "pooling_mode_" in key and on is True]
    )
    known: dict[Any, PoolingKind] = {**_FLAGS, **_MODES}
    if len(modes) != 1 or modes[0] not in known:
        raise ConfigError(f"{path}: pooling_mode is {modes}; lasttoken, mean or cls is supported")
    if data.get("include_prompt") is False:
        raise ConfigError(f"{path}: include_prompt=false is not supported")
    return known[modes[0]]


def _read_prompt(path: Path) -> str:
    """Return the text that the checkpoint puts before every input."""
    data = _read_if_present(path)
    name = data.get("default_prompt_name")
    prompts = data.get("prompts") or {}
    if name is None:
        return ""
    if not isinstance(prompts.get(name), str):
        raise ConfigError(f"{path}: default_prompt_name={name!r} is not among its prompts")
    return str(prompts[name])


def _read_lengths(path: Path) -> tuple[int, ...] | None:
    data = read_json_object(path)
    lengths = data.get("matryoshka_dimensions")
    if lengths is None:
        return () if data.get("is_matryoshka") is True else None
    if not isinstance(lengths, list) or not all(type(each) is int and each > 0 for each in lengths):
        raise ConfigError(f"{path}: matryoshka_dimensions={lengths!r} must be a list of positive integers")
    return tuple(lengths)


def _read_if_present(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}
