"""Runs every Triton kernel once on small tensors and replaces those that fail by torch's op.

A kernel that leaves the device unusable (an illegal address) cannot be replaced: torch's op then raises too.
"""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

import kernels.torch as torch_ops
from kernels.ops import Ops
from kernels.triton.self_check_cases import (
    ATTENTION,
    CASES,
    EXPERTS,
    HEADED,
    Heads,
    Names,
    Tensors,
    make_expected_ops,
)
from kernels.triton_support import find_kernel_errors

logger = logging.getLogger("troupe.kernels")
# Checks whose kernels a recorded step needs.
RECORDED = (ATTENTION, EXPERTS, ("run_conv",), ("scan_states",), ("gather_inputs",))
# Largest allowed error of a result, times its magnitude above 1: a few roundings of the dtype. Wrong kernels err by 1.
TOLERANCE = {torch.float32: 2e-3, torch.float16: 1e-2, torch.bfloat16: 6e-2}
# Errors that building or launching a kernel can raise; Triton's language and options change between versions.
KERNEL_ERRORS: tuple[type[Exception], ...] = (
    *find_kernel_errors(),
    *(subprocess.CalledProcessError, OSError, ImportError, AssertionError),
    *(AttributeError, LookupError, NameError, TypeError, ValueError),
)


def check_ops(
    ops: Ops, device: torch.device, dtype: torch.dtype, cache_dtype: torch.dtype,
    heads: Sequence[tuple[int, int, int]] = (),
) -> Ops:
    """Return the ops; kernels that differ or cannot be launched are replaced by torch's ops.

    Args:
        heads: number of heads, of key heads, and the size of a head, of each kind of layer.
    """
    plain = torch_ops.make_ops(device)
    for names, error in run_checks(ops, device, dtype, cache_dtype, heads):
        if isinstance(error, float) and error <= TOLERANCE[dtype]:
            continue
        why = f"differs by {error:.3g}" if isinstance(error, float) else f"{type(error).__name__}: {error}"
        logger.error("the Triton kernel of %s is replaced by torch's op: it %s", names[0], why)
        changes: dict[str, Any] = {name: getattr(plain, name) for name in names}
        # Torch's ops in their place need lengths on the host, which a recorded step does not have.
        is_safe = ops.is_graph_safe and names not in RECORDED
        ops = replace(ops, **changes, is_graph_safe=is_safe, replaced=(*ops.replaced, names[0]))
    return ops


def run_checks(
    ops: Ops, device: torch.device, dtype: torch.dtype, cache_dtype: torch.dtype,
    heads: Sequence[tuple[int, int, int]] = (),
) -> Iterator[tuple[Names, float | Exception]]:
    """Yield which ops each check runs, and the largest error of a result or what was raised."""
    expected_ops = make_expected_ops(device)
    for names, case in CASES.items():
        worst = 0.0
        try:
            for each in [Heads(*each) for each in heads if names in HEADED] or [Heads()]:
                expected = case(expected_ops, Tensors(device, dtype, cache_dtype, each))
                actual = case(ops, Tensors(device, dtype, cache_dtype, each))
                worst = max(worst, *(measure(*pair) for pair in zip(actual, expected, strict=True)))
            yield names, worst
        except KERNEL_ERRORS as error:
            yield names, error


def measure(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest error, relative to the expected size above 1; integers and infinities must be equal."""
    wide, twin = actual.double(), expected.double()
    error = ((wide - twin).abs() / twin.abs().clamp(min=1.0)).masked_fill(wide == twin, 0.0)
    if not actual.is_floating_point():
        error = error.masked_fill(error > 0, torch.inf)
    return float(error.nan_to_num(nan=torch.inf).max())
