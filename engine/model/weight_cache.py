"""WeightCache: packed models in files, which the next start maps instead of packing the checkpoint again.

    ~/.cache/troupe/packed/<hash of the checkpoint's files, settings, code and processor>.bin
        length of the header, 8 bytes; header, JSON; tensors, each at a multiple of 64 bytes

A file is written in the background, and renamed when it is complete. What a hash covers is never compared again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine.model.decoder import DecoderModel
from engine.model.linear import Linear
from engine.model.moe import Experts
from kernels.ops import Ops, StoredForm, StoredPart

logger = logging.getLogger("troupe.worker")

_MIN_BYTES = 64 * 2**20  # smaller models are packed in less time than a start takes
_MAX_TOTAL_BYTES = 64 * 2**30  # the files that were used longest ago are removed
_MIN_FREE_BYTES = 4 * 2**30  # on the disk, after a file was written
_LINE_BYTES = 64
_PIECE_BYTES = 16 * 2**20  # written at once
_CLOSE_S = 30.0  # for which `close` waits for a file that is being written
_STALE_S = 3600.0
_SOURCES = (Path(__file__).parent, Path(__file__).parents[2] / "kernels")
_EMBEDDING = "embedding"


class WeightCache:
    """The folder of packed models. A folder that cannot be used is as good as an empty one.

    Args:
        folder: default: in the user's cache.
    """

    def __init__(self, folder: Path | None = None, min_bytes: int = _MIN_BYTES) -> None:
        base = os.environ.get("XDG_CACHE_HOME")
        self._folder = folder or (Path(base) if base else Path("~/.cache").expanduser()) / "troupe" / "packed"
        self._min_bytes = min_bytes
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def make_key(self, files: Sequence[Path], ops: Ops, settings: str) -> str | None:
        """Return the name of a packed model; None if these ops have no form for files."""
        if ops.stored is None:
            return None
        found = hashlib.sha256(f"{ops.stored.build}\0{settings}\0".encode())
        for file in files:
            info = file.stat()
            found.update(
                f"{os.path.realpath(file)}:{info.st_ino}:{info.st_size}:{info.st_mtime_ns}\0".encode()
            )
        for folder in _SOURCES:
            for source in sorted(folder.rglob("*.py")):
                found.update(source.read_bytes())
        return found.hexdigest()[:32]

    def fill(self, key: str, model: DecoderModel) -> bool:
        """Map the packed weights into a model; False if there are none."""
        form, path = model.ops.stored, self._folder / f"{key}.bin"
        assert form is not None, "the ops have made the key"
        try:
            info = path.stat()
            if info.st_uid != os.getuid() or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                logger.warning("packed weights: %s can be changed by others, and is not used", path)
                return False
            header, data = _open(path, info.st_size)
            _restore(model, header, data, form)
            os.utime(path)
        except FileNotFoundError:
            return False
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            logger.warning("packed weights: %s is not used: %s", path, error)
            return False
        logger.info("packed weights: mapped %s", path)
        return True

    def store(self, key: str, model: DecoderModel) -> None:
        """Write a model's packed weights in the background, if they are worth it and the disk has room."""
        form = model.ops.stored
        assert form is not None, "the ops have made the key"
        entries, tensors = _describe(model, form)
        header = json.dumps({"hash": model.weights_hash.hex(), "entries": entries}).encode()
        size = sum(_align(each.nbytes) for each in tensors) + _align(8 + len(header))
        if size < self._min_bytes:
            return
        try:
            self._folder.mkdir(mode=stat.S_IRWXU, parents=True, exist_ok=True)
            self._make_room(size)
            if shutil.disk_usage(self._folder).free < size + _MIN_FREE_BYTES:
                logger.info("packed weights: not stored, the disk of %s is nearly full", self._folder)
                return
        except OSError as error:
            logger.info("packed weights: not stored: %s", error)
            return
        self._thread = threading.Thread(
            target=self._write, args=(key, header, tensors), name="packed-weights", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Wait for a file that is being written, or give it up."""
        if self._thread is not None:
            self._thread.join(_CLOSE_S)
            self._is_over.set()
            self._thread.join()

    def _make_room(self, size: int) -> None:
        """Remove what broken writers left, and the files that were used longest ago, if there are too many."""
        for path in self._folder.glob("*.tmp"):
            if time.time() - path.stat().st_mtime > _STALE_S:
                path.unlink(missing_ok=True)
        files = sorted(self._folder.glob("*.bin"), key=lambda path: path.stat().st_mtime)
        total = size + sum(path.stat().st_size for path in files)
        for path in files:
            if total <= _MAX_TOTAL_BYTES and shutil.disk_usage(self._folder).free >= size + _MIN_FREE_BYTES:
                return
            total -= path.stat().st_size
            path.unlink(missing_ok=True)

    def _write(self, key: str, header: bytes, tensors: list[Tensor]) -> None:
        path = self._folder / f"{key}.{os.getpid()}.tmp"
        try:
            with path.open("wb") as file:
                path.chmod(stat.S_IRUSR | stat.S_IWUSR)
                file.write(len(header).to_bytes(8, "little") + header)
                file.write(bytes(-file.tell() % _LINE_BYTES))
                for tensor in tensors:
                    view = tensor.reshape(-1).view(torch.uint8).numpy().data
                    for start in range(0, len(view), _PIECE_BYTES):
                        if self._is_over.is_set():
                            return
                        file.write(view[start : start + _PIECE_BYTES])
                    file.write(bytes(-tensor.nbytes % _LINE_BYTES))
                file.flush()
                os.fsync(file.fileno())
            path.replace(self._folder / f"{key}.bin")
            logger.info("packed weights: stored for the next start in %s", self._folder)
        except OSError as error:
            logger.info("packed weights: not stored: %s", error)
        finally:
            path.unlink(missing_ok=True)


def _align(size: int) -> int:
    return -(-size // _LINE_BYTES) * _LINE_BYTES


def _open(path: Path, size: int) -> tuple[dict[str, Any], Tensor]:
    """Return the header, and the tensors' memory as bytes of the mapped file."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > size - 8:
            raise ValueError("it is truncated")
        header: dict[str, Any] = json.loads(file.read(length))
    data = torch.from_file(os.fspath(path), shared=False, size=size, dtype=torch.uint8)
    return header, data[_align(8 + length) :]


def _list_packed(model: DecoderModel) -> Iterator[tuple[str, Linear | Experts]]:
    for name, module in model.named_modules():
        if isinstance(module, Linear | Experts):
            yield name, module


def _describe(model: DecoderModel, form: StoredForm) -> tuple[dict[str, Any], list[Tensor]]:
    """Return the header's entry of each packed module and each other parameter, and the tensors in their order."""
    tensors: list[Tensor] = []
    end = 0

    def place(tensor: Tensor) -> list[Any]:
        nonlocal end
        tensor = tensor.detach()
        start, end = end, end + _align(tensor.nbytes)
        tensors.append(tensor.contiguous())
        return [start, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]

    def describe(packed: Any) -> list[Any]:
        return [
            [values, {name: place(tensor) for name, tensor in parts.items()}]
            for values, parts in form.take_apart(packed)
        ]

    entries: dict[str, Any] = {"modules": {}, "parameters": {}}
    for name, module in _list_packed(model):
        (packed,) = module.list_packed()
        entries["modules"][name] = describe(packed)
    if model.embedding is not None and model.embedding is not model.lm_head.packed:
        entries[_EMBEDDING] = describe(model.embedding)
    for name, parameter in model.named_parameters():
        if parameter is not model.embed_tokens or model.embedding is None:
            entries["parameters"][name] = place(parameter)
    return entries, tensors


def _restore(model: DecoderModel, header: dict[str, Any], data: Tensor, form: StoredForm) -> None:
    """Fill a model that has no weights yet.

    Raises:
        ValueError, KeyError: the file is not one of this model.
    """

    def find(entry: list[Any]) -> Tensor:
        start, name, shape = entry
        dtype: torch.dtype = getattr(torch, name)
        end = start + torch.Size(shape).numel() * dtype.itemsize
        if end > len(data):
            raise ValueError("it is truncated")
        return data[start:end].view(dtype).view(shape)

    def put(entry: list[Any]) -> Any:
        parts: list[StoredPart] = [
            (values, {name: find(place) for name, place in tensors.items()}) for values, tensors in entry
        ]
        return form.put_together(parts)

    entries = header["entries"]
    modules = {name: put(entry) for name, entry in entries["modules"].items()}
    embedding = put(entries[_EMBEDDING]) if _EMBEDDING in entries else None
    parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
    for name, entry in entries["parameters"].items():
        parameters[name].copy_(find(entry))
    for name, module in _list_packed(model):
        module.take_packed(model.ops, modules[name])
    if "embed_tokens" not in entries["parameters"]:
        model.take_embedding(model.lm_head.packed if embedding is None else embedding)
    model.weights_hash = bytes.fromhex(header["hash"])
