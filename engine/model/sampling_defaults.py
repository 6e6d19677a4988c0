"""Reads the sampling that a checkpoint recommends: generation_config.json, or the metadata of a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.errors import ConfigError, InvalidRequest
from engine.model.checkpoint import read_json_object, resolve_checkpoint
from engine.model.formats.gguf_file import GGUFFile, is_gguf
from engine.sampling_params import SamplingParams

_FILE = "generation_config.json"
# Key -> field, and the default that transformers writes into every file. Such a value is ignored, as in vLLM.
_KEYS: dict[str, tuple[str, float | None]] = {
    "temperature": ("temperature", 1.0),
    "top_k": ("top_k", 50),
    "top_p": ("top_p", 1.0),
    "min_p": ("min_p", None),
    "repetition_penalty": ("repetition_penalty", 1.0),
    "max_new_tokens": ("max_tokens", None),
}
_GGUF_KEYS: dict[str, tuple[str, float | None]] = {
    "general.sampling.temp": ("temperature", None),
    "general.sampling.top_k": ("top_k", None),
    "general.sampling.top_p": ("top_p", None),
    "general.sampling.min_p": ("min_p", None),
    "general.sampling.penalty_repeat": ("repetition_penalty", None),
}


def read_sampling_defaults(path_or_name: str | Path, generation_config: str = "auto") -> dict[str, Any]:
    """Return the fields of SamplingParams that a checkpoint recommends; none without the file.

    Args:
        generation_config: see EngineConfig.

    Raises:
        ConfigError: the checkpoint does not exist, or a value is out of range.
    """
    if generation_config == "vllm":
        return {}
    source = path_or_name if generation_config == "auto" else generation_config
    keys = _KEYS
    if is_gguf(source):
        file = GGUFFile(source)
        path, given, keys = file.path, file.metadata, _GGUF_KEYS
    else:
        path = resolve_checkpoint(source, (_FILE,)) / _FILE
        given = read_json_object(path) if path.is_file() else {}
    found: dict[str, Any] = {
        field: _round(given[key])
        for key, (field, unchosen) in keys.items()
        if given.get(key) not in (None, unchosen)
    }
    try:
        SamplingParams(**found)
    except InvalidRequest as error:
        raise ConfigError(f"{path}: {error}") from error
    return found


def _round(value: float) -> float:
    """Return a float32 of a GGUF file as it was written: 0.6, not 0.6000000238."""
    return float(f"{value:.7g}") if isinstance(value, float) else value
