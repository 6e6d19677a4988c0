"""What passes between host and device: uploads, rows by index, and steps whose results are being copied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.core.actor_messages import StepDone
from kernels.upload import upload


def upload_lists(arrays: Sequence[np.ndarray], device: torch.device) -> tuple[Tensor, ...]:
    """Copy several 1-D integer arrays in one transfer. Returns one int64 tensor per array."""
    lengths = [len(array) for array in arrays]
    return upload(np.concatenate(arrays).astype(np.int64, copy=False), device).split(lengths)


def pick_rows(tensor: Tensor, places: np.ndarray) -> Tensor:
    """Return the rows of a tensor with these ascending, distinct indices; the tensor itself if all are selected."""
    if len(places) == tensor.shape[0]:
        return tensor
    return tensor.index_select(0, upload(places, tensor.device))


def put_rows(tensor: Tensor, places: np.ndarray, part: Tensor) -> None:
    """Write rows selected by `pick_rows` back, changed or replaced."""
    if part is tensor:
        return
    if len(places) == tensor.shape[0]:
        tensor.copy_(part)
    else:
        tensor.index_copy_(0, upload(places, tensor.device), part)


class RowSlots:
    """Assigns slots of a growing buffer to the rows that need one."""

    def __init__(self, max_num_rows: int) -> None:
        self.slot = np.full(max_num_rows, -1, np.int64)  # by row; -1: none
        self.capacity = 0
        self._free: list[int] = []

    def take(self, row: int) -> int:
        """Assign a slot to the row. If none is free, `capacity` doubles and the caller must grow its buffer."""
        if not self._free:
            new_capacity = min(max(1, 2 * self.capacity), len(self.slot))
            self._free = list(range(self.capacity, new_capacity))[::-1]
            self.capacity = new_capacity
        self.slot[row] = self._free.pop()
        return int(self.slot[row])

    def release(self, row: int) -> None:
        if self.slot[row] >= 0:
            self._free.append(int(self.slot[row]))
            self.slot[row] = -1


class Fetch(Protocol):
    """A copy of device tensors to the host, possibly in progress."""

    def is_done(self) -> bool:
        """Whether `wait` would return at once."""

    def wait(self) -> list[np.ndarray]:
        """Wait for the copy and return the tensors' values."""


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A launched step whose results are being copied, or computed by later stages of a pipeline.

    Gated rows of a step share its fetch.
    """

    fetch: Fetch
    finish: Callable[[list[np.ndarray]], StepDone | None]  # None: all rows wait for masks

    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        return self.fetch.is_done()

    def wait(self) -> StepDone | None:
        """Wait for the step and return its results, if it has any without masks."""
        return self.finish(self.fetch.wait())


def wait_for(answer: StepDone | PendingStep | None) -> StepDone | None:
    """Return the results of a step, if it has any, after waiting for them."""
    return answer.wait() if isinstance(answer, PendingStep) else answer
