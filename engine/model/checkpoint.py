"""Finds or downloads the folder of a checkpoint, and reads its files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from glob import escape
from pathlib import Path
from types import MappingProxyType
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import ConfigError

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_MAX_DEPTH = 64  # of JSON; printing and comparing recurse to the same depth
_SAMPLE_BYTES = 4096
NO_OVERRIDES: Mapping[str, Any] = MappingProxyType({})
_FIRST_FILES = ("config.json", _INDEX_FILE, _SINGLE_FILE)


def resolve_checkpoint(
    path_or_name: str | Path, allow_patterns: tuple[str, ...], field: str = "model"
) -> Path:
    """Return the folder of a checkpoint, after downloading matching files if it is a hub name, maybe name@revision."""
    path = Path(path_or_name).expanduser()
    if path.is_dir():
        return path
    name = str(path_or_name)
    repository, _, revision = name.partition("@")
    if path.is_absolute() or path.exists() or name.startswith((".", "~")) or repository.count("/") > 1:
        raise ConfigError(f"{field} {name!r} is not a folder")
    try:
        found = snapshot_download(repository, revision=revision or None, allow_patterns=list(allow_patterns))
        return Path(found)
    except HFValidationError as error:
        raise ConfigError(f"{field} {name!r} is neither a folder nor a hub name: {error}") from error
    except LocalEntryNotFoundError as error:
        raise ConfigError(
            f"{field} {name!r} is not a folder, is not in the local hub cache, and the hub cannot be reached"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise ConfigError(f"{field} {name!r} is not a folder and the hub refused it: {error}") from error


def resolve_weights(path_or_name: str | Path) -> Path:
    """Return the folder of a checkpoint's weights. Only the files of `weight_files` are downloaded.

    Repositories often contain the same weights again, under other names or in other folders.

    Raises:
        ConfigError: as `resolve_checkpoint`, or the index is invalid.
    """
    folder = resolve_checkpoint(path_or_name, _FIRST_FILES)
    if (folder / _SINGLE_FILE).is_file() or not (folder / _INDEX_FILE).is_file():
        return folder
    names = _read_index(folder / _INDEX_FILE)
    return resolve_checkpoint(path_or_name, (*_FIRST_FILES, *map(escape, names)))


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file."""
    too_deep = ConfigError(f"{path} is nested deeper than {_MAX_DEPTH} levels")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    except RecursionError:
        raise too_deep from None
    if _is_deeper(data, _MAX_DEPTH):
        raise too_deep
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must contain an object")
    return data


def override(data: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the object with other values of some keys; those of a config within it are changed one by one."""
    inner = {
        key: override(data[key], value)
        for key, value in changes.items()
        if key.endswith("_config") and isinstance(value, Mapping) and isinstance(data.get(key), dict)
    }
    return data | dict(changes) | inner


def _is_deeper(data: Any, depth: int) -> bool:
    """Whether lists and objects are nested more than `depth` levels deep."""
    level = [data]
    for _ in range(depth + 1):
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
    return any(isinstance(each, dict | list) for each in level)


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint: the single file, or the files of its index."""
    if (folder / _SINGLE_FILE).is_file():
        return [folder / _SINGLE_FILE]
    index = folder / _INDEX_FILE
    if not index.is_file():
        raise ConfigError(f"{folder} has neither {_SINGLE_FILE} nor {_INDEX_FILE}; only safetensors are read")
    names = _read_index(index)
    for name in names:
        if not (folder / name).is_file():
            raise ConfigError(f"{index} names {name!r}, which is not in the folder")
    return [folder / name for name in names]


def _read_index(index: Path) -> list[str]:
    """Return the distinct file names in an index."""
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ConfigError(f"{index} is not a valid index: weight_map must map tensors to file names")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name:
            raise ConfigError(
                f"{index}: weight_map[{tensor!r}]={repr(name)[:80]} must be the name of a file beside it"
            )
    return sorted(set(weight_map.values()))


def list_tensor_names(files: list[Path]) -> set[str]:
    """Return the names of all tensors in safetensors files, of which only the headers are read."""
    found: set[str] = set()
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            found |= set(tensors.keys())
    return found


def hash_weights(files: list[Path]) -> bytes:
    """Return a hash of valid safetensors files, without reading them completely.

    It covers the name, size and header of each file, and the first and last 4 KiB of each tensor. Training changes
    practically every element of a tensor, and a new vocabulary changes the end of the embedding. Manual edits elsewhere
    are not detected.
    """
    found = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            start = file.read(8)
            header = file.read(int.from_bytes(start, "little"))
            found.update(f"{path.name}:{path.stat().st_size}:".encode() + start + header)
            for name, entry in json.loads(header).items():
                if name != "__metadata__":
                    begin, end = (len(start) + len(header) + offset for offset in entry["data_offsets"])
                    for place in (begin, max(begin, end - _SAMPLE_BYTES)):
                        file.seek(place)
                        found.update(file.read(min(_SAMPLE_BYTES, end - place)))
    return found.digest()


def read_tensors(
    files: list[Path], prefixes: tuple[str, ...] = ("",), hold: Callable[[Tensor], None] = lambda tensor: None
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) one at a time, on the CPU, as a view of its mapped file, after calling `hold` with it."""
    for file in files:
        try:
            with safe_open(file, framework="pt", device="cpu") as tensors:
                for name in tensors.keys():  # noqa: SIM118  not a dict
                    if name.startswith(prefixes):
                        tensor = tensors.get_tensor(name)
                        hold(tensor)
                        yield name, tensor
        except SafetensorError as error:
            raise ConfigError(f"{file} cannot be read as safetensors: {error}") from error
