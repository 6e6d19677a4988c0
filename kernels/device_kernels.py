"""Finding the Triton kernels of a device, where there is one and Triton works on it."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import sysconfig
from functools import cache
from pathlib import Path
from types import ModuleType

import torch

# What Triton supports; older GPUs run torch's own kernels.
MIN_CAPABILITY = (8, 0)


@cache
def find_device_kernels(device_type: str, name: str) -> ModuleType | None:
    """Return the module `kernels.triton.<name>` for tensors of this device type; None: use torch.

    Imported by name, because Triton is installed only where it can run and is not needed on CPU.
    """
    if device_type != "cuda" or find_triton_gap() or torch.cuda.get_device_capability() < MIN_CAPABILITY:
        return None
    return importlib.import_module(f"kernels.triton.{name}")


@cache
def find_triton_gap() -> str:
    """What Triton lacks on this machine, as the end of a sentence; empty when it lacks nothing.

    Its launches are compiled by the machine's own C compiler, with Python's headers.
    """
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "triton needs a C compiler (gcc or clang) and finds none"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "triton needs Python's headers (python3-dev) and finds none"
    return ""


def find_kernel_errors() -> tuple[type[Exception], ...]:
    """What a launch can raise: torch's error, and Triton's own where it is installed."""
    if importlib.util.find_spec("triton") is None:
        return (RuntimeError,)
    return (RuntimeError, importlib.import_module("triton.errors").TritonError)
