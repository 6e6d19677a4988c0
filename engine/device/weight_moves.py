"""Move a model's tensors to another device in place, so that references to them stay valid."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from engine.model.decoder import DecoderModel
from engine.model.linear import Linear
from engine.model.moe import Experts


class Owner(Protocol):
    def modules(self) -> Iterator[nn.Module]:
        """Return the modules that hold its weights."""


def list_tensors(*owners: Owner) -> list[Tensor]:
    """Return every tensor of models and drafters once, including the parts of packed weights."""
    found: list[Tensor] = []
    for module in (module for owner in owners for module in owner.modules()):
        found += (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if isinstance(module, Linear | Experts):
            found += _tensors_of(module.list_packed())
        elif isinstance(module, DecoderModel):
            found += _tensors_of(module.embedding)
    return list({id(tensor): tensor for tensor in found}.values())


def move_tensors(tensors: Iterable[Tensor], device: torch.device) -> None:
    """Move the tensors' storages to a device. Tensors that share a storage share the new one."""
    # The old storages are kept until the end, so that no address is used by two of them.
    moved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
    for tensor in tensors:
        old = tensor.untyped_storage()
        if old.data_ptr() not in moved:
            moved[old.data_ptr()] = (old, _copy(old, device))
        new = torch.empty(0, dtype=tensor.dtype, device=device)
        new.set_(moved[old.data_ptr()][1], tensor.storage_offset(), tensor.size(), tensor.stride())
        tensor.data = new


def _copy(storage: torch.UntypedStorage, device: torch.device) -> torch.UntypedStorage:
    copy = torch.UntypedStorage(storage.nbytes(), device=device)
    copy.copy_(storage)
    return copy


def _tensors_of(packed: object) -> Iterator[Tensor]:
    if isinstance(packed, Tensor):
        yield packed
    elif isinstance(packed, list | tuple):
        for part in packed:
            yield from _tensors_of(part)
    elif is_dataclass(packed):
        for field in fields(packed):
            yield from _tensors_of(getattr(packed, field.name))
    else:
        for part in getattr(packed, "__dict__", {}).values():
            yield from _tensors_of(part)
