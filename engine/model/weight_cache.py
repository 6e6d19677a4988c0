"""WeightCache: packed models in files, which the next start maps instead of packing the checkpoint again.

    ~/.cache/troupe/packed/<hash of the checkpoint's files, settings, code and processor>.bin
        length of the header, 8 bytes; header, JSON; tensors, each at a multiple of 64 bytes

A file is written in the background. What a hash covers is never compared again.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine.cache_folder import CacheFolder, hash_inputs
from engine.model.decoder import DecoderModel
from engine.model.linear import Linear
from engine.model.moe import Experts
from kernels.ops import Ops, StoredForm, StoredPart

logger = logging.getLogger("troupe.worker")

_MIN_BYTES = 64 * 2**20  # smaller models are packed in less time than a start takes
_LINE_BYTES = 64
_PIECE_BYTES = 16 * 2**20  # written at once
_DELAY_S = 5.0  # after which a file is written: the first requests have the processor and the disk for themselves
_CLOSE_S = 30.0  # for which `close` waits for a file that is being written
_SOURCES = (Path(__file__).parent, Path(__file__).parents[2] / "kernels")
_EMBEDDING = "embedding"


class WeightCache:
    """The packed models of a folder."""

    def __init__(self, folder: Path | None = None, min_bytes: int = _MIN_BYTES) -> None:
        self._folder = CacheFolder(folder)
        self._min_bytes = min_bytes
        self._is_closing, self._is_over = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def make_key(self, files: Sequence[Path], ops: Ops, settings: str) -> str | None:
        """Return the name of a packed model; None if these ops have no form for files."""
        if ops.stored is None:
            return None
        sources = (source.read_text("utf-8") for folder in _SOURCES for source in sorted(folder.rglob("*.py")))
        return hash_inputs(files, ops.stored.build, settings, *sources) + ".bin"

    def fill(self, key: str, model: DecoderModel) -> bool:
        """Map the packed weights into a model; False if there are none."""
        form, path = model.ops.stored, self._folder.find(key)
        assert form is not None, "the ops have made the key"
        if path is None:
            return False
        try:
            header, data = _open(path, path.stat().st_size)
            _restore(model, header, data, form)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            logger.warning("packed weights: %s is not used: %s", path, error)
            return False
        logger.info("packed weights: mapped %s", path)
        return True

    def store(self, key: str, model: DecoderModel) -> None:
        """Write a model's packed weights in the background, if they are worth it."""
        form = model.ops.stored
        assert form is not None, "the ops have made the key"
        entries, tensors = _describe(model, form)
        header = json.dumps({"hash": model.weights_hash.hex(), "entries": entries}).encode()
        size = sum(_align(each.nbytes) for each in tensors) + _align(8 + len(header))
        if size < self._min_bytes:
            return

        def write() -> None:
            self._is_closing.wait(_DELAY_S)
            self._folder.write(key, self._list_pieces(header, tensors), size)

        self._thread = threading.Thread(target=write, name="packed-weights", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait for a file that is being written, or give it up."""
        self._is_closing.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)
            self._is_over.set()
            self._thread.join()

    def _list_pieces(self, header: bytes, tensors: list[Tensor]) -> Iterator[bytes | memoryview]:
        yield len(header).to_bytes(8, "little") + header
        yield bytes(-(8 + len(header)) % _LINE_BYTES)
        for tensor in tensors:
            view = tensor.reshape(-1).view(torch.uint8).numpy().data
            for start in range(0, len(view), _PIECE_BYTES):
                if self._is_over.is_set():
                    raise OSError("the engine is closed")
                yield view[start : start + _PIECE_BYTES]
            yield bytes(-tensor.nbytes % _LINE_BYTES)


def _align(size: int) -> int:
    return -(-size // _LINE_BYTES) * _LINE_BYTES


def _open(path: Path, size: int) -> tuple[dict[str, Any], Tensor]:
    """Return the header, and the tensors' memory as bytes of the mapped file."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > size - 8:
            raise ValueError("it is truncated")
        header: dict[str, Any] = json.loads(file.read(length))
    data = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
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
        entries["modules"][name] = [describe(packed) for packed in module.list_packed()]
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
    modules = {name: list(map(put, each)) for name, each in entries["modules"].items()}
    embedding = put(entries[_EMBEDDING]) if _EMBEDDING in entries else None
    parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
    for name, entry in entries["parameters"].items():
        parameters[name].copy_(find(entry))
    for name, module in _list_packed(model):
        module.take_packed(model.ops, *modules[name])
    if "embed_tokens" not in entries["parameters"]:
        model.take_embedding(model.lm_head.packed if embedding is None else embedding)
    model.weights_hash = bytes.fromhex(header["hash"])
