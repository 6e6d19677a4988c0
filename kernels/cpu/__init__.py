"""The ops as C++ kernels for x86-64 CPUs, compiled on the machine where they run.

    make_ops(device, dtype)                     builds when it must, some ten seconds; call it in a thread
    make_ops(device, dtype, builds=False)       only what an earlier run has built, at once
    None                                        there are none here: the log says why, plain torch goes on

`NativeBuild` does the same in the background, with a `status` to look at.
"""

from __future__ import annotations

import logging

import torch

from kernels.cpu.build import NativeBuild
from kernels.cpu.layers import can_run
from kernels.cpu.library import MAX_THREADS, NativeLibrary, count_cores
from kernels.cpu.native_ops import NativeOps
from kernels.ops import Ops

__all__ = [
    "NativeBuild",
    "NativeLibrary",
    "count_cores",
    "count_native_threads",
    "make_native_ops",
    "make_ops",
]

logger = logging.getLogger("troupe.kernels")


def make_ops(
    device: torch.device, dtype: torch.dtype, num_threads: int | None = None, builds: bool = True
) -> Ops | None:
    """Return native ops with a pool of threads of their own, or None and a line in the log.

    Args:
        device: of the model; native ops are for the CPU.
        dtype: of the model and its caches: float32 or bfloat16.
        num_threads: including the caller's, 256 at most; None: one per core that this process may use.
        builds: whether to wait for a compiler when no earlier run has left a library.

    Raises:
        ValueError: num_threads below 1.
    """
    if device.type != "cpu" or not can_run(dtype):
        logger.info("native ops: not available: they run float32 and bfloat16 on the CPU, not %s", dtype)
        return None
    build = NativeBuild()
    build.start(builds=builds)
    library = build.wait() if builds else build.library
    logger.info("native ops: %s", build.status)
    return None if library is None else make_native_ops(library, num_threads)


def make_native_ops(library: NativeLibrary, num_threads: int | None = None) -> Ops:
    """Return the ops of a library that is there; on a machine of more cores than a pool takes, on so many.

    Raises:
        ValueError: num_threads below 1.
    """
    return NativeOps(library, count_native_threads(num_threads)).make_ops()


def count_native_threads(num_threads: int | None) -> int:
    """Return how many threads native ops run on that were asked for so many; None: one per core."""
    return min(count_cores() if num_threads is None else num_threads, MAX_THREADS)
