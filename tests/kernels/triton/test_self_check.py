"""The check at start: right kernels stay, those that are broken on purpose are replaced by torch's ops and named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

import kernels.torch as torch_ops
from kernels.ops import Ops
from kernels.torch.elementwise import FP8
from kernels.triton import make_ops
from kernels.triton.self_check import check_ops
from kernels.triton.self_check_cases import ATTENTION, CASES

pytestmark = pytest.mark.gpu


@triton.jit
def uncompilable_kernel(x_ptr: tl.tensor) -> None:
    tl.store(x_ptr, tl.no_such_function(x_ptr))


def launch_uncompilable(x: Tensor, *_: Any, **__: Any) -> Tensor:
    uncompilable_kernel[(1,)](x)
    return x


def spoil(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The op, with its last result off by one."""

    def spoiled(*given: Any, **options: Any) -> Tensor:
        result = op(*given, **options)
        result.view(-1)[-1] += 1
        return result

    return spoiled


def check(ops: Ops, device: torch.device, dtype: torch.dtype = torch.float32) -> Ops:
    return check_ops(ops, device, dtype, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_right_kernels_stay(device: torch.device, dtype: torch.dtype) -> None:
    ops = make_ops(device, dtype)
    assert check(ops, device, dtype) == ops
    assert check_ops(ops, device, dtype, FP8) == ops


@pytest.mark.parametrize("name", [names[0] for names in CASES if names[0] not in ("gather_inputs", "apply_bitmask")])
def test_a_wrong_result_is_replaced(
    device: torch.device, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    right = make_ops(device, torch.float32)
    spoiled = replace(right, **{name: spoil_first(getattr(right, name))})
