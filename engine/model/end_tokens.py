"""Reads the token ids that end a text, from tokenizer and checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from engine.model.checkpoint import read_json_object, resolve_checkpoint
from engine.model.formats.gguf_file import is_gguf
from engine.model.formats.gguf_model import GGUFModel

_FILES = ("generation_config.json", "config.json")  # the first with ids is used
_KEY = "eos_token_id"


def read_eos_token_ids(path_or_name: str | Path, own: int | None = None) -> tuple[int, ...]:
    """Return the distinct end-of-text ids of a checkpoint.

    Args:
        path_or_name: folder or hub name of the checkpoint; both files may be missing.
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
