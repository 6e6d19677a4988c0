"""GGUFFile: the metadata and tensors of a GGUF file, versions 2 and 3.

    magic "GGUF", version, number of tensors, number of metadata entries
    metadata entries: name, type, value
    tensor entries: name, sizes (innermost first), kind, offset
    data, aligned

Source: the GGUF specification of the ggml project, docs/gguf.md.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.model.formats.gguf_blocks import KINDS, GGUFTensor

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32  # unless the metadata says otherwise
_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_FLOATS = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}  # kinds that are plain numbers


def is_gguf(path_or_name: str | Path) -> bool:
    """Whether this names a GGUF file, and not a folder or a repository."""
    return str(path_or_name).lower().endswith(".gguf")


@dataclass(frozen=True, slots=True)
class _Entry:
    shape: tuple[int, ...]  # outermost first
    kind: int
    offset: int  # from the start of the file


class GGUFFile:
    """An open file; tensors are views of it, read from disk when they are used.

    Args:
        path: of a file ending in .gguf.

    Raises:
        ConfigError: the file is missing, truncated or of another version, or a tensor lies outside it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        if not self.path.is_file():
            raise ConfigError(f"model {str(path)!r} is not a file")
        with self.path.open("rb") as file:
            reader = _Reader(file, self.path.stat().st_size)
            try:
                self.metadata, self._entries = self._read_header(reader)
            except (struct.error, UnicodeDecodeError) as error:
                raise ConfigError(f"{self.path} is truncated or not a GGUF file: {error}") from error
            self.header_bytes = file.tell()
        self._data = torch.from_file(str(self.path), shared=False, size=reader.size, dtype=torch.uint8)

    @property
    def names(self) -> list[str]:
        """The names of the tensors, in the order of the file."""
        return list(self._entries)

    @property
    def has_int4(self) -> bool:
        """Whether some tensor has codes of 4 bits."""
        return any(entry.kind in KINDS and KINDS[entry.kind].has_int4 for entry in self._entries.values())

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, as torch writes it."""
        return self._entries[name].shape

    def read(self, name: str) -> Tensor | GGUFTensor:
        """Return a tensor.

        Raises:
            ConfigError: its kind is not supported.
        """
        entry, num_bytes = self._entries[name], self._count_bytes(name)
        if entry.offset + num_bytes > len(self._data):
            raise ConfigError(f"{self.path} is truncated: tensor {name} ends after the file")
        data = self._data[entry.offset : entry.offset + num_bytes]
        if entry.kind in _FLOATS:
            return data.view(_FLOATS[entry.kind]).view(entry.shape)
        return GGUFTensor(KINDS[entry.kind], data.view(prod(entry.shape[:-1]), -1), torch.Size(entry.shape))

    def find_ends(self, name: str, num_bytes: int) -> tuple[int, int]:
        """Return where the first and the last bytes of a tensor start in the file."""
        start, size = self._entries[name].offset, self._count_bytes(name)
        return start, max(start, start + size - num_bytes)

    def _count_bytes(self, name: str) -> int:
        entry = self._entries[name]
        if entry.kind in _FLOATS:
            return prod(entry.shape) * _FLOATS[entry.kind].itemsize
        kind = KINDS.get(entry.kind)
        if kind is None:
            known = ", ".join(["F32", "F16", "BF16", *(each.name for each in KINDS.values())])
            raise ConfigError(
                f"{self.path}: tensor {name} has the GGUF type {entry.kind}; supported: {known}"
            )
        if entry.shape[-1] % kind.block_size:
            raise ConfigError(
                f"{self.path}: tensor {name} has rows of {entry.shape[-1]}; {kind.name} needs multiples of "
                f"{kind.block_size}"
            )
        return prod(entry.shape) // kind.block_size * kind.block_bytes

    def _read_header(self, reader: _Reader) -> tuple[dict[str, Any], dict[str, _Entry]]:
        if reader.take(4) != _MAGIC:
            raise ConfigError(f"{self.path} is not a GGUF file")
        version, num_tensors, num_entries = reader.unpack("IQQ")
        if version not in _VERSIONS:
            raise ConfigError(f"{self.path}: GGUF version {version} is not supported; supported: 2, 3")
        metadata = {}
        for _ in range(num_entries):
            name = reader.string()
            (kind,) = reader.unpack("I")
            metadata[name] = reader.value(kind)
        entries = {}
        for _ in range(num_tensors):
            name = reader.string()
            (num_sizes,) = reader.unpack("I")
            *sizes, kind, offset = reader.unpack("Q" * num_sizes + "IQ")
            entries[name] = _Entry(tuple(reversed(sizes)), kind, offset)
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if alignment not in (8, 16, 32, 64, 128, 256, 4096):
            raise ConfigError(
                f"{self.path}: general.alignment={alignment!r} must be a power of two from 8 to 4096"
            )
        start = -(-reader.file.tell() // alignment) * alignment
        return metadata, {
            name: _Entry(entry.shape, entry.kind, start + entry.offset) for name, entry in entries.items()
        }


class _Reader:
    """Reads values one after another; raises struct.error at the end of the file."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file = file
        self.size = size

    def take(self, num_bytes: int) -> bytes:
        if num_bytes > self.size - self.file.tell():
            raise struct.error(f"{num_bytes} more bytes are missing")
        return self.file.read(num_bytes)

    def unpack(self, layout: str) -> tuple[Any, ...]:
        layout = f"<{layout}"
        return struct.unpack(layout, self.take(struct.calcsize(layout)))

    def string(self) -> str:
        (length,) = self.unpack("Q")
        return self.take(length).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            inner, count = self.unpack("IQ")
            if inner in _NUMBERS:
                width = struct.calcsize(_NUMBERS[inner])
                return list(struct.unpack(f"<{count}{_NUMBERS[inner]}", self.take(count * width)))
            return [self.value(inner) for _ in range(count)]
        if kind not in _NUMBERS:
            raise struct.error(f"metadata of the unknown type {kind}")
        return self.unpack(_NUMBERS[kind])[0]
