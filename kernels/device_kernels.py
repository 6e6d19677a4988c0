"""Finding the Triton kernels of a device, where there is one and Triton is installed."""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from types import ModuleType

import torch

# What Triton supports; older GPUs run torch's own kernels.
MIN_CAPABILITY = (8, 0)


@cache
def find_device_kernels(device_type: str, name: str) -> ModuleType | None:
    """Return the module `kernels.triton.<name>` for tensors of this device type; None: use torch.

    Imported by name, because Triton is installed only where it can run and is not needed on CPU.
    """
    if device_type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    if torch.cuda.get_device_capability() < MIN_CAPABILITY:
        return None
    return importlib.import_module(f"kernels.triton.{name}")
