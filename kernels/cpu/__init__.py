"""The ops as C++ kernels for x86-64 and 64-bit ARM CPUs, compiled on the machine where they run by `NativeBuild`."""

from __future__ import annotations

from kernels.cpu.build import NativeBuild
from kernels.cpu.library import MAX_THREADS, NativeLibrary, count_cores
from kernels.cpu.native_ops import NativeOps
from kernels.ops import Ops

__all__ = [
    "NativeBuild",
    "NativeLibrary",
    "count_cores",
    "count_native_threads",
    "make_native_ops",
]


def make_native_ops(library: NativeLibrary, num_threads: int | None = None) -> Ops:
    """Return the ops of a library that is there; on a machine of more cores than a pool takes, on so many.

    Raises:
        ValueError: num_threads below 1.
    """
    return NativeOps(library, count_native_threads(num_threads)).make_ops()


def count_native_threads(num_threads: int | None) -> int:
    """Return how many threads native ops run on that were asked for so many; None: one per core."""
    return min(count_cores() if num_threads is None else num_threads, MAX_THREADS)
