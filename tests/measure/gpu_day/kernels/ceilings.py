"""Measured ceilings of the device: copying memory and multiplying matrices."""

from __future__ import annotations

from typing import Any

import torch

from tests.measure.gpu_day.kernels.timing import Bench


def measure_ceilings(bench: Bench) -> dict[str, Any]:
    """Bytes a second read and written by a copy, read by a sum, and operations a second of products."""
    copy, read = _measure_memory(bench)
    products = {}
    for rows in (bench.pick(8192, 64), bench.pick(256, 16)):
        width = bench.pick(8192, 64)
        left = torch.randn(rows, width, device=bench.device, dtype=bench.dtype)
        right = torch.randn(width, width, device=bench.device, dtype=bench.dtype)
        products[f"{rows}x{width}x{width}"] = 2 * rows * width**2 / bench.time(lambda: left @ right)  # noqa: B023
    return {
        "device": torch.cuda.get_device_name() if bench.device.type == "cuda" else "cpu",
        "dtype": str(bench.dtype),
        "copy_bytes_per_s": copy,
        "read_bytes_per_s": read,
        "gemm_flops_per_s": max(products.values()),
        "gemm": products,
    }


def _measure_memory(bench: Bench) -> tuple[float, float]:
    size = bench.pick(2**30, 2**16)
    source = torch.ones(size // 4, device=bench.device)
    target = torch.empty_like(source)
    copy = bench.time(lambda: target.copy_(source))
    return 2 * size / copy, size / bench.time(lambda: torch.sum(source))
