"""What Triton needs on a machine, and what its launches raise; importable where it is not installed."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path

# What Triton supports; older GPUs run torch's own kernels.
MIN_CAPABILITY = (8, 0)


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
