"""Copies data from the host to the device without blocking the host."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy a host array to the device. A copy to CUDA goes through pinned memory, so the host does not wait."""
    return upload_tensor(torch.from_numpy(np.require(array, requirements=("C", "W"))), device)


def upload_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to the device, like `upload`."""
    if device.type != "cuda" or tensor.device == device:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
