"""Finds and reads the files of an adapter; its identity is the hash of their content."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from engine.errors import ConfigError, InvalidRequest
from engine.model.checkpoint import resolve_checkpoint

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"


def find_adapter(path: str, roots: tuple[str, ...] | None = None) -> Path:
    """Return the folder of an adapter, after downloading it if `path` is a hub name."""
    if roots is not None:
        resolved = Path(path).expanduser().resolve()
        if not any(resolved.is_relative_to(Path(root).expanduser().resolve()) for root in roots):
            allowed = ", ".join(roots) or "none; start the server with --lora-root"
            raise InvalidRequest(
                f"lora_path={path!r} must be within an allowed folder ({allowed})", "lora_path"
            )
        path = str(resolved)
    try:
        return resolve_checkpoint(path, (CONFIG_FILE, WEIGHTS_FILE), "lora_path")
    except ConfigError as error:
        raise InvalidRequest(str(error), "lora_path") from error


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The content of an adapter's files. It is read once, so that the hash is that of what is used."""

    config: bytes
    weights: bytes
    digest: str  # SHA-256 of both, as hexadecimal digits

    @classmethod
    def read(cls, folder: Path) -> AdapterFiles:
        """Read the files."""
        try:
            config, weights = ((folder / name).read_bytes() for name in (CONFIG_FILE, WEIGHTS_FILE))
        except OSError as error:
            raise InvalidRequest(f"the adapter {folder} cannot be read: {error}", "lora_path") from error
        parts = (hashlib.sha256(part).digest() for part in (config, weights))
        return cls(config, weights, hashlib.sha256(b"".join(parts)).hexdigest())

    def parse_config(self) -> dict[str, Any]:
        """Return `adapter_config.json`."""
        try:
            data = json.loads(self.config)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{CONFIG_FILE} is not valid JSON: {error}", "lora_path") from error
        if not isinstance(data, dict):
            raise InvalidRequest(f"{CONFIG_FILE} must contain an object", "lora_path")
        return data

    def parse_weights(self) -> dict[str, Tensor]:
        """Return the tensors by name."""
        try:
            return load(self.weights)
        except SafetensorError as error:
            raise InvalidRequest(
                f"{WEIGHTS_FILE} cannot be read as safetensors: {error}", "lora_path"
            ) from error
