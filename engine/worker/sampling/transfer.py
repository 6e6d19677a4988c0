"""Copies small arrays to the device without a sync, and selects subsets of a batch's rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy a host array to the device; on CUDA through pinned memory, so that the host does not wait."""
    tensor = torch.from_numpy(np.require(array, requirements=("C", "W")))
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


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
        """Free the row's slot, if any."""
        if self.slot[row] >= 0:
            self._free.append(int(self.slot[row]))
            self.slot[row] = -1
