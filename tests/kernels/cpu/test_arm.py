"""64-bit ARM under qemu: the bits of AVX2. `make test-arm` runs the other tests of the kernels there."""

import pytest
import torch

from kernels.cpu.native_ops import NativeOps
from tests.kernels.cpu.conftest import require_library
from tests.kernels.cpu.remote import RemoteLibrary


@pytest.fixture(scope="module")
def pair() -> list[NativeOps]:
    """Native ops of this machine's AVX2 and of an ARM that any program may expect."""
    return [NativeOps(each, 2) for each in (require_library("x86-64-v3"), RemoteLibrary("armv8-a"))]


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_avx2(pair: list[NativeOps], dtype: torch.dtype, quantization: str | None) -> None:
    x, weight = torch.randn(7, 160).to(dtype), torch.randn(100, 160).to(dtype)
    x86, arm = (ops.linear(x, ops.pack_linear(weight, None, quantization), None) for ops in pair)
    assert torch.equal(arm, x86)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_and_activations_are_those_of_avx2(pair: list[NativeOps], dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 126).to(dtype), torch.randn(126).to(dtype)
    x[0, 0] = torch.nan
    for name, arguments in {"rms_norm": (x, weight, 1e-5), "silu_mul": (x,)}.items():
        x86, arm = (getattr(ops.make_ops(), name)(*arguments) for ops in pair)
        assert torch.equal(arm.nan_to_num(9), x86.nan_to_num(9))
