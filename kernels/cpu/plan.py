"""NativePlan: the requests of one step as C sees them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kernels.cpu.structs import BatchStruct


@dataclass(frozen=True, slots=True)
class NativePlan:
    """The requests of one step; the tensors own the memory."""

    struct: BatchStruct
    block_size: int
    tensors: tuple[Tensor, Tensor, Tensor]
