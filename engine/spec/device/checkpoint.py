"""Reads the checkpoints of heads: safetensors, or pickled tensors through torch's restricted loader."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint

from engine.errors import ConfigError
from engine.model.checkpoint import read_json_object, read_tensors, resolve_checkpoint
from engine.model.weight_targets import Targets, check_names

_PATTERNS = ("config.json", "*.safetensors", "*.bin", "*.pt")


def read_head_folder(path_or_name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config.json and all tensors of a folder or hub repository."""
    folder = resolve_checkpoint(path_or_name, _PATTERNS, "speculative_config: model")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"speculative_config: model: {folder} has no config.json")
    config = read_json_object(folder / "config.json")
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return config, dict(read_tensors(files))
    pickles = sorted([*folder.glob("*.bin"), *folder.glob("*.pt")])
    if not pickles:
        raise ConfigError(f"speculative_config: model: {folder} has no weights (*.safetensors, *.bin, *.pt)")
    tensors: dict[str, Tensor] = {}
    for file in pickles:
        tensors |= _read_pickle(file)
    return config, tensors


def _read_pickle(file: Path) -> dict[str, Tensor]:
    try:
        names = get_unsafe_globals_in_checkpoint(file)
        if names:
            raise ConfigError(f"{file} contains more than tensors: {', '.join(sorted(names))}")
        # weights_only: nothing but tensors and plain containers is unpickled.
        found = torch.load(file, map_location="cpu", weights_only=True)
    except (ValueError, RuntimeError, EOFError) as error:
        raise ConfigError(f"{file} cannot be read as tensors: {str(error).partition(chr(10))[0]}") from error
    if not isinstance(found, dict) or not all(isinstance(each, Tensor) for each in found.values()):
        raise ConfigError(f"{file} must contain a dictionary of tensors")
    return found


def copy_tensors(
    targets: Targets, tensors: dict[str, Tensor], where: str, ignored: Iterable[str] = ()
) -> None:
    """Copy tensors to their targets."""
    check_names(where, targets.keys() - tensors.keys(), tensors.keys() - targets.keys() - set(ignored))
    for name, target in targets.items():
        tensor = tensors[name]
        if tensor.shape != target.shape:
            raise ConfigError(
                f"{where}: tensor {name} has shape {list(tensor.shape)}, expected {list(target.shape)}"
            )
        target.copy(tensor)
