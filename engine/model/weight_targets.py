"""WeightTargets: the memory that the loader copies each checkpoint tensor to."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from engine.errors import ConfigError
from engine.model.adapters import MatrixPart
from engine.model.formats.encoded import EncodedTensor
from engine.model.shard import Shard

_MAX_NAMES = 8  # in an error


class Target(Protocol):
    """Takes one tensor of a checkpoint."""

    @property
    def shape(self) -> torch.Size:
        """Required shape of the tensor."""

    @property
    def dtype(self) -> torch.dtype | None:
        """Required dtype of an encoded tensor; None: floating-point of at least 16 bits."""

    @property
    def owner(self) -> nn.Module | None:
        """The module that is packed when all its tensors are there; None: the memory stays as it is."""

    def copy(self, tensor: Tensor) -> None:
        """Write a tensor of the required shape into memory."""


@dataclass(frozen=True, slots=True)
class WeightTarget:
    """The memory that one tensor is copied to, and how it is changed on the way."""

    memory: Tensor
    is_repeated: bool = False  # each row of the memory is a copy of the tensor
    # [rows] int64: the row of the tensor for each row of the memory; None: as it is
    order: Tensor | None = None
    offset: float = 0.0  # added to each number
    # Takes a tensor as the checkpoint has it, for ops that pack it from there; None: it is copied to the memory.
    keep: Callable[[Tensor | EncodedTensor], None] | None = None
    # Takes a matrix in codes alone, for ops that pack it from there.
    keep_codes: Callable[[EncodedTensor], None] | None = None
    part: MatrixPart | None = None  # where an adapter changes the matrix
    owner: nn.Module | None = None

    @property
    def shape(self) -> torch.Size:
        return self.memory.shape[1:] if self.is_repeated else self.memory.shape

    @property
    def dtype(self) -> None:
        """Any floating-point dtype is cast."""

    def copy(self, tensor: Tensor) -> None:
        if self.order is not None:
            tensor = tensor.index_select(0, self.order)
        if self.offset:
            tensor = tensor.float() + self.offset
        self.memory.copy_(tensor)


@dataclass(frozen=True, slots=True)
class ShardedTarget:
    """Takes a tensor of the checkpoint and copies the rank's part of it to another target."""

    target: Target
    shard: Shard
    owner: nn.Module | None = None

    @property
    def shape(self) -> torch.Size:
        return self.shard.find_shape(self.target.shape)

    @property
    def dtype(self) -> torch.dtype | None:
        return self.target.dtype

    def copy(self, tensor: Tensor) -> None:
        self.target.copy(self.shard.take(tensor))


@dataclass(frozen=True, slots=True)
class SkippedTarget:
    """A tensor of the checkpoint that another rank holds."""

    shape: torch.Size
    dtype: torch.dtype | None = None
    owner: nn.Module | None = None

    def copy(self, tensor: Tensor) -> None:
        """Do nothing."""


Targets = dict[str, Target]  # by the name in the checkpoint
# End of the name of a tensor of all experts -> the matrices of each; Qwen3.5 is published so.
_STACKED_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@dataclass(frozen=True, slots=True)
class WeightTargets:
    """Expected content of a model's checkpoint."""

    targets: Targets  # required tensors
    tied: dict[str, str]  # optional tensors, with the name of the tensor that each must equal
    ignored_suffixes: tuple[str, ...]  # of tensors that are not needed
    ignored_prefixes: tuple[str, ...] = ()

    def rename(self, prefix: str, renames: tuple[tuple[str, str], ...]) -> WeightTargets:
        """Return the same targets under the names of another checkpoint."""

        def change(name: str) -> str:
            for ours, theirs in renames:
                name = name.replace(ours, theirs)
            return prefix + name

        return replace(
            self,
            targets={change(name): target for name, target in self.targets.items()},
            tied={change(name): change(other) for name, other in self.tied.items()},
            ignored_prefixes=tuple(map(change, self.ignored_prefixes)),
        )

    def list_parts(self, name: str) -> list[str]:
        """Return the names of the single matrices in a stacked tensor of all experts, in its order; [] for others."""
        if name in self.targets:
            return []
        for suffix, parts in _STACKED_EXPERTS.items():
            prefix = name.removesuffix(suffix)
            if prefix == name:
                continue
            found: list[str] = []
            while (first := f"{prefix}{len(found) // len(parts)}.{parts[0]}.weight") in self.targets:
                found += [first.replace(f".{parts[0]}.", f".{part}.") for part in parts]
            return found
        return []

    def is_ignored(self, name: str) -> bool:
        return name.endswith(self.ignored_suffixes) or name.startswith(self.ignored_prefixes)


def own(targets: Targets, owner: nn.Module) -> Targets:
    """Return the targets as those of a module that is packed when all of them are filled."""
    return {name: replace(target, owner=owner) for name, target in targets.items()}  # type: ignore[type-var]


def add_prefix(prefix: str, targets: Targets) -> Targets:
    """Return the targets with the prefix and a dot before their names."""
    return {f"{prefix}.{name}": target for name, target in targets.items()}


def list_parameters(module: nn.Module) -> WeightTargets:
    """Return the parameters of a module under their own names."""
    return WeightTargets({name: WeightTarget(each.data) for name, each in module.named_parameters()}, {}, ())


def check_names(source: object, missing: Collection[str], unexpected: Collection[str]) -> None:
    """Raise ConfigError if a checkpoint lacks tensors that its config asks for, or has others."""
    if missing or unexpected:
        raise ConfigError(
            f"the tensors of {source} do not match its config: "
            f"missing: {list_names(missing)}; unexpected: {list_names(unexpected)}"
        )


def list_names(names: Collection[str]) -> str:
    rest = len(names) - _MAX_NAMES
    return (", ".join(sorted(names)[:_MAX_NAMES]) or "none") + (f" and {rest} more" if rest > 0 else "")
