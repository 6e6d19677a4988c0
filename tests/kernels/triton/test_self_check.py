"""The check at start: right kernels stay, those that are broken on purpose are replaced by torch's ops and named."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

import kernels.torch as torch_ops
from kernels.torch.elementwise import FP8
from kernels.triton import make_ops, self_check
from kernels.triton.linear import pack_linear
from kernels.triton.self_check import check_ops
from kernels.triton.self_check_cases import ATTENTION, CASES, EXPERTS, make_expected_ops

pytestmark = pytest.mark.gpu

FLOAT = torch.float32
# The arguments that each op writes to, if it does not return its result.
WRITTEN: dict[str, Callable[..., Tensor]] = {
    "apply_bitmask": lambda logits, _: logits,
    "gather_inputs": lambda *given: given[-1].block_tables,
}


@triton.jit
def uncompilable_kernel(x_ptr: tl.tensor) -> None:
    tl.store(x_ptr, tl.no_such_function(x_ptr))


def launch_uncompilable(x: Tensor, *_: Any, **__: Any) -> Tensor:
    uncompilable_kernel[(1,)](x)
    return x


def spoil(name: str, op: Callable[..., Any]) -> Callable[..., Any]:
    """The op, with one number of its result off by one."""

    def spoiled(*given: Any, **options: Any) -> Any:
        result = op(*given, **options)
        written = WRITTEN[name](*given) if name in WRITTEN else result
        (written[0] if isinstance(written, tuple) else written).view(-1)[-1] += 1
        return result

    return spoiled


@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "is_whole"),
    [
        (torch.float16, FP8, False),
        *(pytest.param(*each, True, marks=pytest.mark.soak) for each in ((torch.float16, FP8), (FLOAT, FLOAT))),
    ],
)
def test_right_kernels_stay(
    device: torch.device,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    is_whole: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Attention takes longest to interpret; its own tests compare it with the reference, and `make soak` here."""
    if not is_whole:
        monkeypatch.setattr(self_check, "CASES", {each: case for each, case in CASES.items() if each != ATTENTION})
    ops = make_ops(device, dtype)
    ops = replace(ops, pack_linear=partial(pack_linear, device=device, has_fp8=True))
    assert check_ops(ops, device, dtype, cache_dtype) == ops


def test_all_that_triton_computes_is_checked(device: torch.device) -> None:
    ops, plain = make_ops(device, FLOAT), torch_ops.make_ops(device)
    own = {name for name in ops.__slots__ if getattr(ops, name) not in (None, getattr(plain, name))}
    assert own - {"name", "is_graph_safe"} == {name for names in CASES for name in names}


def test_wrong_results_are_replaced(
    device: torch.device, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's own results, one number off, stand for the kernels' of all ops but experts; attention is left out."""
    cases = {names: case for names, case in CASES.items() if names != ATTENTION}
    monkeypatch.setattr(self_check, "CASES", cases)
    right, plain, exact = make_ops(device, FLOAT), torch_ops.make_ops(device), make_expected_ops(device)
    spoiled = {names[0]: spoil(names[0], getattr(right if names == EXPERTS else exact, names[0])) for names in cases}
    checked = check_ops(replace(right, **spoiled, pack_lora=exact.pack_lora), device, FLOAT, FLOAT)
    assert checked.replaced == tuple(spoiled) and not checked.is_graph_safe
    assert len(caplog.records) == len(spoiled) and "rms_norm is replaced by torch's op" in caplog.text
    names = [name for names in cases for name in names]
    assert [getattr(checked, name) for name in names] == [getattr(plain, name) for name in names]


@pytest.mark.parametrize("names", [("silu_mul",), ATTENTION, EXPERTS], ids=lambda names: names[0])
def test_a_kernel_that_does_not_compile_is_replaced_alone(
    device: torch.device,
    caplog: pytest.LogCaptureFixture,
    names: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the other kernels only one is checked beside it: the tests above check them all."""
    checked_names = (names, ("add_rms_norm",))
    monkeypatch.setattr(self_check, "CASES", {each: CASES[each] for each in checked_names})
    ops = replace(make_ops(device, FLOAT), **{names[0]: launch_uncompilable})
    checked = check_ops(ops, device, FLOAT, FLOAT)
    assert checked.replaced == names[:1] and checked.is_graph_safe == (names == ("silu_mul",))
    assert "no_such_function" in caplog.text
    assert all(getattr(checked, name) is not getattr(ops, name) for name in names)
    assert checked.add_rms_norm is ops.add_rms_norm


def test_attention_is_checked_with_the_heads_of_the_model(
    device: torch.device, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles go by the size of a head: those of one size may be too large for a GPU on which others run."""
    monkeypatch.setattr(self_check, "CASES", {ATTENTION: CASES[ATTENTION]})
    right = make_expected_ops(device)

    def attend(q: Tensor, *given: Any, **options: Any) -> Tensor:
        if q.shape[2] == 96:
            raise RuntimeError("out of resource: shared memory")
        return right.paged_attention(q, *given, **options)

    ops = replace(right, paged_attention=attend)
    assert not check_ops(ops, device, FLOAT, FLOAT, [(6, 2, 64), (4, 1, 32)]).replaced
    assert check_ops(ops, device, FLOAT, FLOAT, [(6, 2, 64), (4, 1, 96)]).replaced == ("paged_attention",)
    assert "shared memory" in caplog.text
