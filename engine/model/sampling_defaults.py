"""Reads generation_config.json or the metadata of a GGUF file: recommended sampling, and tokens that end a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.errors import ConfigError, InvalidRequest
from engine.model.checkpoint import read_json_object, resolve_checkpoint
from engine.model.formats.gguf_file import GGUFFile, is_gguf
from engine.model.formats.gguf_model import GGUFModel
from engine.packaged_models import find_packaged
from engine.sampling_params import SamplingParams

_FILE = "generation_config.json"
# Key -> field, and the default that transformers writes into every file. Such a value is ignored, as in vLLM.
_KEYS: dict[str, tuple[str, float | None]] = {
    "temperature": ("temperature", 1.0), "top_k": ("top_k", 50), "top_p": ("top_p", 1.0),
    "min_p": ("min_p", None), "repetition_penalty": ("repetition_penalty", 1.0),
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
    """Return the fields of SamplingParams that a checkpoint recommends; none without the file."""
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
    packaged = find_packaged(path)
    found: dict[str, Any] = {} if packaged is None else dict(packaged.sampling)
    found |= {
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


_FILES = (_FILE, "config.json")  # the first with ids is used
_KEY = "eos_token_id"


def read_eos_token_ids(path_or_name: str | Path, own: int | None = None) -> tuple[int, ...]:
    """Return the distinct end-of-text ids of a checkpoint.

    Args:
        own: the tokenizer's id, returned first.

    Raises:
        ConfigError: the checkpoint does not exist, or an id is not an integer of at least 0.
    """
    ids = [] if own is None else [own]
    if is_gguf(path_or_name):
        return tuple(dict.fromkeys(ids + GGUFModel(path_or_name).read_end_tokens()))
    folder = resolve_checkpoint(path_or_name, _FILES)
    for path in [folder / name for name in _FILES if (folder / name).is_file()]:
        value = read_json_object(path).get(_KEY)
        if value is not None:
            ids += _check(value, path)
            break
    return tuple(dict.fromkeys(ids))


def _check(value: Any, path: Path) -> list[int]:
    ids = value if isinstance(value, list) else [value]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise ConfigError(f"{path}: {_KEY}={value!r} must be an integer of at least 0, or a list of them")
    return ids
