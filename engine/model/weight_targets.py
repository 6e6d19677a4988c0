"""WeightTargets: where the tensors of a checkpoint go, as a model tells its loader."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class WeightTarget:
    """The memory that one tensor is copied to."""

    memory: Tensor
    is_repeated: bool = False  # each row of the memory is a copy of the tensor

    @property
    def shape(self) -> torch.Size:
        """What the checkpoint's tensor must have."""
        return self.memory.shape[1:] if self.is_repeated else self.memory.shape


Targets = dict[str, WeightTarget]  # by the name in the checkpoint


@dataclass(frozen=True, slots=True)
class WeightTargets:
    """What a checkpoint of one model holds."""

    targets: Targets  # tensors that must be there
    tied: dict[str, str]  # tensors that may be there, and the name of the one that each must repeat
    ignored_suffixes: tuple[str, ...]  # of tensors without influence


def add_prefix(prefix: str, targets: Targets) -> Targets:
    """Return the targets under names that begin with the prefix and a dot."""
    return {f"{prefix}.{name}": target for name, target in targets.items()}
