"""Every kernel against torch's op on this device, in every dtype, with the heads of common models."""

from __future__ import annotations

from typing import Any

import torch

from kernels.torch.elementwise import FP8
from kernels.triton import make_ops
from kernels.triton.self_check import TOLERANCE, run_checks
from tests.measure.gpu_day.kernels.timing import Bench

DTYPES = [(dtype, dtype) for dtype in TOLERANCE] + [(torch.bfloat16, FP8)]
# Number of heads, of key heads, and the size of a head: Qwen3-0.6B, Qwen3.5, Gemma 3 1B.
HEADS = ((16, 8, 128), (16, 2, 256), (4, 1, 256))


def check_kernels(bench: Bench) -> list[dict[str, Any]]:
    """One entry a kernel and dtype: the largest error or what was raised, what is allowed, and whether it is."""
    found = []
    heads = () if bench.is_smoke else HEADS
    for dtype, cache_dtype in DTYPES[:1] if bench.is_smoke else DTYPES:
        for names, error in run_checks(make_ops(bench.device, dtype), bench.device, dtype, cache_dtype, heads):
            found.append(
                {
                    "name": names[0],
                    "dtype": str(dtype),
                    "cache_dtype": str(cache_dtype),
                    "error": error if isinstance(error, float) else f"{type(error).__name__}: {error}",
                    "allowed": TOLERANCE[dtype],
                    "is_right": isinstance(error, float) and error <= TOLERANCE[dtype],
                }
            )
    return found
