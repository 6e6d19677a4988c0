"""Loads an adapter for a model: every tensor of the file must change something, or the load fails with its name."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from engine.comm import fold
from engine.errors import InvalidRequest
from engine.lora.adapter_config import AdapterConfig, read_adapter_config
from engine.lora.adapter_files import AdapterFiles
from engine.model.adapters import AdapterHandle, BoundAdapter, EmbeddingChange, MatrixPart
from engine.model.linear import Linear, sum_squares
from engine.model.protocol import Model
from kernels import Ops
from kernels.lora import LoraMatrix, LoraPart, PackedLora
from kernels.upload import upload_tensor

Moved = TypeVar("Moved", LoraMatrix, LoraPart, EmbeddingChange)
_PREFIX = "base_model.model."
_EMBEDDING = "model.embed_tokens"
# Start of the names in a model for images, which changed with the versions of transformers.
_TEXT_PART = re.compile(r"^(?:(?:model|language_model|text_model)\.)*")
# Ends of tensor names, and what they are.
_KINDS = {
    "lora_A.weight": "A", "lora_B.weight": "B", "lora_B.bias": "bias", "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.weight": "magnitude",
    "lora_embedding_A": "A", "lora_embedding_B": "B", "base_layer.weight": "base", "weight": "saved",
}  # fmt: skip


@dataclass(eq=False, slots=True)
class Adapter:
    """An adapter in memory, for one model."""

    matrices: dict[Linear, LoraMatrix] = field(default_factory=dict)
    saved: dict[nn.Module, Tensor] = field(default_factory=dict)
    embedding: EmbeddingChange | None = None
    bound: BoundAdapter | None = None
    handle: AdapterHandle | None = None  # None: there is one rank

    def bind(self, model: Model) -> BoundAdapter:
        """Return the adapter for the model's current ops."""
        ops: Ops = model.ops
        if self.bound is None or self.bound.ops is not ops:
            device = model.embed_tokens.device
            matrices: dict[nn.Module, PackedLora] = {
                linear: linear.pack_lora(ops, _move(matrix, device))
                for linear, matrix in self.matrices.items()
            }
            saved = {
                linear: ops.pack_linear(upload_tensor(each, device), None, None) for linear, each in self.saved.items()
            }
            embedding = None if self.embedding is None else _move(self.embedding, device)
            self.bound = BoundAdapter(ops, matrices, saved, embedding, model.lm_head, self.handle)
        return self.bound

    @property
    def num_bytes(self) -> int:
        change = self.embedding or EmbeddingChange()
        tensors = [*self.saved.values(), change.table, change.a, change.b]
        for matrix in self.matrices.values():
            tensors += [matrix.a, *(part.b for part in matrix.parts)]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


class AdapterPeers(Protocol):
    """The other ranks, while rank 0 loads one adapter."""

    handle: AdapterHandle

    def measure(self, module: str, tensors: dict[str, Tensor]) -> list[Tensor]:
        """Return each rank's result of `AdapterBuilder.measure`."""

    def put(self, module: str, tensors: dict[str, Tensor]) -> None:
        """Add a module to the adapter of each rank."""


def load_adapter(
    files: AdapterFiles, model: Model, max_rank: int, peers: AdapterPeers | None = None
) -> Adapter:
    """Make an adapter from its files.

    Raises:
        InvalidRequest: a setting or a tensor is not supported, is missing, or does not fit the model.
    """
    config = read_adapter_config(files.parse_config())
    modules: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for stored, tensor in files.parse_weights().items():
        module, kind = _split_name(stored)
        modules[module][kind] = tensor
    builder = AdapterBuilder(config, model, max_rank, peers)
    for module, tensors in sorted(modules.items()):
        builder.add(module, tensors)
        if peers is not None:
            peers.put(module, tensors)
    return builder.finish()


def _move(value: Moved, device: torch.device) -> Moved:
    """Return the dataclass with its tensors on a device."""
    if device.type == "cpu":
        return value
    changes: dict[str, Any] = {}
    for item in fields(value):
        part = getattr(value, item.name)
        if isinstance(part, Tensor):
            changes[item.name] = upload_tensor(part, device)
        elif isinstance(part, tuple):
            changes[item.name] = tuple(_move(each, device) for each in part)
    return replace(value, **changes)


def _split_name(stored: str) -> tuple[str, str]:
    for end, kind in _KINDS.items():
        if stored.startswith(_PREFIX) and stored.endswith(f".{end}"):
            return stored.removeprefix(_PREFIX).removesuffix(f".{end}"), kind
    raise InvalidRequest(f"tensor {stored} of the adapter is not supported", "lora_path")


class AdapterBuilder:
    """Collects the changes of an adapter, module by module, and keeps the rank's part of each."""

    def __init__(
        self, config: AdapterConfig, model: Model, max_rank: int, peers: AdapterPeers | None = None
    ) -> None:
        self._config = config
        self._model = model
        self._max_rank = max_rank
        self._peers = peers
        self._adapter = Adapter(handle=None if peers is None else peers.handle)
        self._names = {_TEXT_PART.sub("", name): name for name in (_EMBEDDING, *model.matrix_parts)}
        # By layer: the part of its matrix, rows of A, and the change.
        self._parts: dict[Linear, list[tuple[Tensor, LoraPart]]] = defaultdict(list)

    def add(self, module: str, tensors: dict[str, Tensor]) -> None:
        """Take in the whole tensors of one module, by kind. Leaves what other ranks need in the dictionary."""
        name = self._find_name(module)
        part = self._model.matrix_parts.get(name)
        if name != _EMBEDDING and part is None:
            why = "the model does not have or adapters cannot change"
            if module.endswith("kv_b_proj"):
                why = "latent attention keeps as two products of each head; train without it"
            raise InvalidRequest(f"the adapter changes {module}, which {why}", "lora_path")
        if "saved" in tensors:
            self._take_saved(name, tensors)
            return
        self._check_base(name, tensors.pop("base", None))
        # On other ranks than 0, the length of each row of a matrix whose columns are divided.
        norm = tensors.pop("norm", None)
        optional = {"magnitude": self._config.has_magnitude, "bias": self._config.has_bias}
        wanted = {"A", "B", *(kind for kind, is_there in optional.items() if is_there)}
        if missing := sorted(wanted - tensors.keys()):
            raise InvalidRequest(f"the adapter has no {' and no '.join(missing)} for {module}", "lora_path")
        if more := sorted(tensors.keys() - wanted):
            raise InvalidRequest(
                f"the adapter's {more[0]} of {module} is not used by its config", "lora_path"
            )
        if part is None:
            self._change_embedding(tensors)
        else:
            self._change_matrix(module, part, tensors, norm)

    def measure(self, module: str, tensors: dict[str, Tensor]) -> Tensor:
        """Return the squared length of each row of a changed matrix, as far as this rank has its columns."""
        part = self._model.matrix_parts[self._find_name(module)]
        assert isinstance(part.linear, Linear) and part.shard is not None, "its columns are divided"
        rows, scale = slice(part.start, part.start + part.num_rows), self._config.compute_scale(module)
        return part.linear.measure_rows(rows, part.shard.take(tensors["A"]), tensors["B"], scale)

    def _find_name(self, module: str) -> str:
        """Return the model's name of a module."""
        return self._names.get(_TEXT_PART.sub("", module), module)

    def finish(self) -> Adapter:
        """Stack the parts of each matrix."""
        adapter = self._adapter
        for linear, found in self._parts.items():
            ranks = torch.cat([a for a, _ in found]).contiguous()
            parts = tuple(part for _, part in found)
            adapter.matrices[linear] = LoraMatrix(ranks, parts, linear.out_features)
        if not (adapter.matrices or adapter.saved or adapter.embedding):
            raise InvalidRequest("the adapter changes nothing", "lora_path")
        return adapter

    def _change_matrix(
        self, module: str, part: MatrixPart, tensors: dict[str, Tensor], norm: Tensor | None
    ) -> None:
        linear, shard = part.linear, part.shard
        assert isinstance(linear, Linear)
        shape = torch.Size((part.num_rows, linear.in_features))
        if shard is not None:
            shape = shard.find_shape(shape)
        a, b = self._check_ranks(module, tensors["A"], tensors["B"], shape)
        vectors = {
            kind: _check_vector(module, kind, tensors.get(kind), len(b)) for kind in ("bias", "magnitude")
        }
        if shard is not None and shard.dim == 1:
            a = shard.take(a)
        else:
            b = _pick_rows(part, b)
            vectors = {
                kind: each if each is None else _pick_rows(part, each) for kind, each in vectors.items()
            }
        scale, factor, offset = self._config.compute_scale(module), None, None
        if (magnitude := vectors["magnitude"]) is not None:
            rows = slice(part.start, part.start + part.num_rows)
            if norm is None:
                squares = linear.measure_rows(rows, a, b, scale)
                if self._peers is not None and shard is not None and shard.dim == 1:
                    squares = fold([squares, *self._peers.measure(module, tensors)])
                    tensors["norm"] = squares.sqrt()  # for the other ranks
                norm = squares.sqrt()
            factor = magnitude / norm
            if linear.bias is not None:  # it is not scaled
                offset = (1 - factor) * linear.bias[rows].cpu().float()
        if vectors["bias"] is not None:
            offset = vectors["bias"] * scale
        done = self._parts[linear]
        first_rank = sum(len(each) for each, _ in done)
        done.append((self._store(a), LoraPart(part.start, first_rank, self._store(b), scale, factor, offset)))

    def _change_embedding(self, tensors: dict[str, Tensor]) -> None:
        table = self._model.embed_tokens
        a, b = self._check_ranks(_EMBEDDING, tensors["A"], tensors["B"], (table.shape[1], table.shape[0]))
        scale, factor = self._config.compute_scale(_EMBEDDING), None
        magnitude = _check_vector(_EMBEDDING, "magnitude", tensors.get("magnitude"), table.shape[1])
        if magnitude is not None:
            if self._model.config.embedding_multiplier != 1:
                raise InvalidRequest(
                    "use_dora: the model scales its embedding, which does not work", "lora_path"
                )
            factor = magnitude / sum_squares(self._model.unpack_embedding().cpu().t(), a, b, scale).sqrt()
        change = (self._store(a.t().contiguous()), (b.float() * scale).to(self._model.dtype), factor)
        self._adapter.embedding = EmbeddingChange(None, *change)

    def _take_saved(self, module: str, tensors: dict[str, Tensor]) -> None:
        if len(tensors) > 1:
            raise InvalidRequest(
                f"the adapter has a whole matrix and other tensors for {module}", "lora_path"
            )
        table, weight = self._model.embed_tokens, tensors["saved"]
        if module not in (_EMBEDDING, "lm_head"):
            raise InvalidRequest(
                f"modules_to_save: {module} is not supported; allowed: {_EMBEDDING}, lm_head", "lora_path"
            )
        _check_shape(module, "whole matrix", weight, tuple(table.shape))
        if module == _EMBEDDING:
            self._adapter.embedding = EmbeddingChange(self._cast(weight))
        else:
            head = self._model.matrix_parts["lm_head"]
            self._adapter.saved[self._model.lm_head] = self._cast(_pick_rows(head, weight))

    def _check_base(self, module: str, weight: Tensor | None) -> None:
        """Accept a copy of the base model's embedding, which PEFT saves beside its adapter. A rank checks its rows."""
        if weight is None:
            return
        table = self._model.embed_tokens
        if module not in (_EMBEDDING, "lm_head"):
            raise InvalidRequest(f"tensor {_PREFIX}{module}.base_layer.weight is not supported", "lora_path")
        packed = self._model.lm_head
        base = (self._model.unpack_embedding() if module == _EMBEDDING else packed.unpack()).cpu()
        # A quantized matrix differs a little; a trained or resized one much more.
        is_same = weight.shape == table.shape
        if is_same and module == "lm_head":
            weight = _pick_rows(self._model.matrix_parts[module], weight)
        is_same = is_same and bool((weight - base).norm() <= 0.2 * base.norm())
        if not is_same:
            raise InvalidRequest(f"the adapter was trained on another {module} than the model's", "lora_path")

    def _check_ranks(
        self, module: str, a: Tensor, b: Tensor, shape: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """Check A [rank, in] and B [out, rank] of a module with a matrix of `shape` [out, in]."""
        rank = self._config.find_rank(module)
        if rank > self._max_rank:
            raise InvalidRequest(
                f"the adapter's rank of {module} is {rank}; max_lora_rank allows {self._max_rank}",
                "lora_path",
            )
        _check_shape(module, "A", a, (rank, shape[1]))
        _check_shape(module, "B", b, (shape[0], rank))
        return a, b

    def _store(self, tensor: Tensor) -> Tensor:
        """Cast to the model's dtype. bfloat16 stays in a float32 model: the same numbers in half the memory."""
        is_half = tensor.dtype == torch.bfloat16 and self._model.dtype == torch.float32
        return tensor.contiguous() if is_half else self._cast(tensor)

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._model.dtype).contiguous()


def _pick_rows(part: MatrixPart, tensor: Tensor) -> Tensor:
    """Return the rank's rows of a tensor of all rows, as they are stored."""
    rows = tensor if part.shard is None else part.shard.take(tensor)
    return rows if part.order is None else rows.index_select(0, part.order)


def _check_shape(module: str, kind: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape or not tensor.is_floating_point():
        raise InvalidRequest(
            f"the adapter's {kind} of {module} is {list(tensor.shape)} {tensor.dtype}; it must be {list(shape)}",
            "lora_path",
        )


def _check_vector(module: str, kind: str, tensor: Tensor | None, size: int) -> Tensor | None:
    if tensor is None:
        return None
    _check_shape(module, kind, tensor, (size,))
    return tensor.float()
