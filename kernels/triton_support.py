"""Reports what Triton lacks on a machine and which errors its launches raise; importable without Triton."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path

# Minimum compute capability of Triton; older GPUs use torch.
MIN_CAPABILITY = (8, 0)


def find_triton_gap() -> str:
    """Return what Triton lacks on this machine, as the end of a sentence; empty if nothing is missing.

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
    """Return the errors that a launch can raise: torch's, and Triton's where it is installed."""
    if importlib.util.find_spec("triton") is None:
        return (RuntimeError,)
    return (RuntimeError, importlib.import_module("triton.errors").TritonError)
