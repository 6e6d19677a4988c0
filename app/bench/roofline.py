"""What this machine can do right now: memory bandwidth and the rate of matrix products.

Measured beside the figures they bound, because a shared machine is a different one every minute.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from app.bench.shapes import Footprint

BUFFER_BYTES = 512 * 2**20
GEMM_SIZE = 2048
REPEATS = 5


@dataclass(frozen=True, slots=True)
class Roofline:
    """Bytes a second read by one thread and by all, and operations a second of a product of the dtype."""

    one_thread: float
    all_threads: float
    flops: float
    device: str = "cpu"

    def step_time(self, footprint: Footprint, num_rows: int, context: int, bytes_per_value: float) -> float:
        """Seconds that a decode step takes at least."""
        reading = footprint.step_bytes(num_rows, context, bytes_per_value, bytes_per_value) / self.all_threads
        return max(reading, footprint.step_flops(num_rows, context) / self.flops)

    def describe(self) -> str:
        """One line for the report."""
        return (
            f"bandwidth {self.one_thread / 1e9:.1f} GB/s by one thread, {self.all_threads / 1e9:.1f} by all; "
            f"products {self.flops / 1e9:.0f} GFLOP/s"
        )


def measure_roofline(dtype: torch.dtype, num_threads: int) -> Roofline:
    """Measure the CPU; takes about a second."""
    before = torch.get_num_threads()
    buffer = torch.ones(BUFFER_BYTES // 4)
    try:
        torch.set_num_threads(1)
        one = BUFFER_BYTES / _best(buffer.sum)
        torch.set_num_threads(num_threads)
        every = BUFFER_BYTES / _best(buffer.sum)
        left = torch.randn(GEMM_SIZE, GEMM_SIZE).to(dtype)
        right = torch.randn(GEMM_SIZE, GEMM_SIZE).to(dtype)
        flops = 2 * GEMM_SIZE**3 / _best(lambda: torch.mm(left, right))
    finally:
        torch.set_num_threads(before)
    return Roofline(one, max(one, every), flops)


def _best(work: Callable[[], object]) -> float:
    """The shortest of several runs, in seconds."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)
