"""Timing by graph replay, so that what the host does between launches does not count."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

WARM_UP = 3
REPLAYS = 7
# A graph holds as many calls as fill about this time.
GRAPH_S = 2e-3


@dataclass(frozen=True, slots=True)
class Bench:
    """Where the benchmarks run, and how large.

    Args:
        is_smoke: sizes that a CPU interprets in seconds; the figures mean nothing.
    """

    device: torch.device
    is_smoke: bool

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def pick(self, full: int, smoke: int) -> int:
        """A size of the work."""
        return smoke if self.is_smoke else full

    def time(self, work: Callable[[], object]) -> float:
        """Seconds of one call, the best of some replays."""
        return time_replays(work) if self.device.type == "cuda" else _time_calls(work, 1)


def time_replays(work: Callable[[], object]) -> float:
    """Seconds of one call inside a CUDA graph of many calls."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            work()
        stream.synchronize()
        count = max(1, min(200, int(GRAPH_S / max(1e-6, _time_calls(work, 1)))))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(count):
                work()
        best = float("inf")
        for _ in range(REPLAYS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            best = min(best, start.elapsed_time(end) / 1e3 / count)
    return best


def _time_calls(work: Callable[[], object], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / count
