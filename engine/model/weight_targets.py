"""WeightTargets: the memory that the loader copies each checkpoint tensor to."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from engine.errors import ConfigError
from engine.model.adapters import MatrixPart
from engine.model.formats.encoded import EncodedTensor
from engine.model.shard import Shard

_MAX_NAMES = 8  # in an error


@dataclass(frozen=True, slots=True)
class WeightTarget:
    """The memory that one tensor is copied to, and how it is changed on the way."""

    memory: Tensor  # on the meta device: another rank holds the tensor
    shard: Shard | None = None  # the part of the tensor that is copied; None: all
    is_repeated: bool = False  # each row of the memory is a copy of the tensor
    order: Tensor | None = None  # [size] int64: the index in the tensor for each index of the memory; None: as it is
    order_dim: int = 0
    offset: float = 0.0  # added to each number
    # Takes a tensor as the checkpoint has it, for ops that pack it from there; None: it is copied to the memory.
    keep: Callable[[Tensor | EncodedTensor], None] | None = None
    # Takes a matrix in codes alone, for ops that pack it from there.
    keep_codes: Callable[[EncodedTensor], None] | None = None
    part: MatrixPart | None = None  # where an adapter changes the matrix
    owner: nn.Module | None = None  # is packed when all its tensors are there; None: the memory stays as it is

    @property
    def shape(self) -> torch.Size:
        """Required shape of the tensor."""
        shape = self.memory.shape[1:] if self.is_repeated else self.memory.shape
        return shape if self.shard is None else self.shard.find_shape(shape)

    def copy(self, tensor: Tensor) -> None:
        """Write a tensor of the required shape into memory."""
        if self.shard is not None:
            tensor = self.shard.take(tensor)
        if self.order is not None:
            tensor = tensor.index_select(self.order_dim, self.order)
        if self.offset:
            tensor = tensor.float() + self.offset
        self.memory.copy_(tensor)

    def cut(self, shard: Shard) -> WeightTarget:
        """Return the target of a larger tensor, of which it takes a part; its values are copied."""
        return replace(self, shard=shard, keep=None, keep_codes=None)


Targets = dict[str, WeightTarget]  # by the name in the checkpoint
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
    return {name: replace(target, owner=owner) for name, target in targets.items()}


def add_prefix(prefix: str, targets: Targets) -> Targets:
    """Return the targets with the prefix and a dot before their names."""
    return {f"{prefix}.{name}": target for name, target in targets.items()}


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
