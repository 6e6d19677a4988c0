"""Reads the sampling that a checkpoint recommends, from its generation_config.json."""

from __future__ import annotations

from pathlib import Path

from engine.errors import ConfigError, InvalidRequest
from engine.model.checkpoint import read_json_object, resolve_checkpoint
from engine.model.formats.gguf_file import is_gguf
from engine.sampling_params import SamplingParams

_FILE = "generation_config.json"
# Each field with the default that transformers writes into every file. Such a value is ignored, as in vLLM.
_UNCHOSEN = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": None, "repetition_penalty": 1.0}


def read_sampling_defaults(path_or_name: str | Path) -> dict[str, float]:
    """Return the fields of SamplingParams that a checkpoint recommends; none without the file.

    Raises:
        ConfigError: the checkpoint does not exist, or a value is out of range.
    """
    if is_gguf(path_or_name):
        return {}
    path = resolve_checkpoint(path_or_name, (_FILE,)) / _FILE
    given = read_json_object(path) if path.is_file() else {}
    found = {name: given[name] for name, unchosen in _UNCHOSEN.items() if given.get(name) not in (None, unchosen)}
    try:
        SamplingParams(**found)
    except InvalidRequest as error:
        raise ConfigError(f"{path}: {error}") from error
    return found
