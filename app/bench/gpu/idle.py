"""How long the device has nothing to do between two forward passes of a batch that decodes."""

from __future__ import annotations

from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from app.bench.runners import TroupeRunner
from app.bench.workload import Job

Interval = tuple[float, float]


def measure_idle(settings: dict[str, Any], jobs: list[Job]) -> dict[str, Any]:
    """Profile a warm run: the largest gap of each step is the one between two forward passes."""
    runner = TroupeRunner(settings, None, 0.6)
    try:
        runner.run(jobs)
        runner.await_graphs()
        before = runner.llm.stats().num_steps
        has_device = torch.cuda.is_available()
        kinds = [ProfilerActivity.CUDA] if has_device else [ProfilerActivity.CPU]
        with profile(activities=kinds) as profiler:
            runner.run(jobs)
        num_steps = runner.llm.stats().num_steps - before
    finally:
        runner.close()
    if not has_device:
        return {"num_steps": num_steps, "verdict": "no device whose idle time could be measured"}
    busy = [
        (event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    gaps = find_gaps(busy)[:num_steps]
    gap = median(gaps) if gaps else 0.0
    return {
        "num_steps": num_steps,
        "median_gap_us": gap,
        "idle_share": sum(gaps) / (max(end for _, end in busy) - min(start for start, _ in busy)),
        "verdict": f"median gap between forward passes {gap:.0f} us over {num_steps} steps of {len(jobs)} rows",
    }


def find_gaps(busy: list[Interval]) -> list[float]:
    """Times in which no interval runs, longest first."""
    gaps, end = [], float("inf")
    for start, stop in sorted(busy):
        if start > end:
            gaps.append(start - end)
        end = max(end, stop) if end != float("inf") else stop
    return sorted(gaps, reverse=True)
