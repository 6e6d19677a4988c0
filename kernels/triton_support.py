"""Checks whether Triton can run here, and lists the errors of its launches. The module needs no Triton."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path

# Triton needs at least this compute capability; older GPUs use torch.
MIN_CAPABILITY = (8, 0)


def find_triton_gap() -> str:
    """Return the reason why Triton cannot run here, "" if it can run.

    Triton compiles the code that launches its kernels with the machine's C compiler and Python's headers.
    """
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "triton needs a C compiler (gcc or clang), and none was found"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "triton needs Python's headers (python3-dev), and none were found"
    return ""


def find_kernel_errors() -> tuple[type[Exception], ...]:
    """Return the errors that a kernel launch can raise: torch's, and Triton's if it is installed."""
    if importlib.util.find_spec("triton") is None:
        return (RuntimeError,)
    return (RuntimeError, importlib.import_module("triton.errors").TritonError)
