"""Compiled ops: the same values, and no new variant once one token and several have been seen."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from kernels import Ops, torch_ops
from kernels.compiled_ops import compile_ops

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.timeout(600),
]
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler for torch.compile")


def call_all(ops: Ops, num_tokens: int) -> list[torch.Tensor]:
    """Every compiled op on a step of that many tokens."""
    generator = torch.Generator().manual_seed(num_tokens)
    hidden, residual = torch.randn(2, num_tokens, 32, generator=generator)
    heads = torch.randn(num_tokens, 8, 8, generator=generator)
    cos, sin = torch.randn(2, num_tokens, 1, 8, generator=generator)
    caches = [torch.zeros(20, 16, 2, 8) for _ in range(2)]
    weight, norm = torch.linspace(0.5, 1.5, 32), torch.linspace(0.5, 1.5, 48).view(6, 8)
    q = ops.norm_rope_store(heads, norm, 1e-6, cos, sin, *caches, torch.arange(num_tokens), 4)
    first = ops.rms_norm(residual, weight, 1e-6)
    return [q, *caches, first, *ops.add_rms_norm(hidden, residual, weight, 1e-6), ops.silu_mul(hidden)]


def test_compiled_ops_equal_plain_ones_and_trace_nothing_new_after_warm_up() -> None:
    """Traced and not translated to C++: that takes minutes and does not change what is traced."""
    plain, compiled = torch_ops.make_ops(), compile_ops(torch_ops.make_ops(), backend="eager")
    assert compiled.name == "torch-sdpa-compiled"
    for num_tokens in (1, 7, 2):
        for actual, expected in zip(call_all(compiled, num_tokens), call_all(plain, num_tokens), strict=True):
            torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    num_variants = counters["stats"]["unique_graphs"]
    assert num_variants > 0
    lengths = random.Random(0)
    for _ in range(200):
        call_all(compiled, lengths.randint(1, 300))
    assert counters["stats"]["unique_graphs"] == num_variants


@needs_compiler
def test_a_fused_kernel_equals_the_plain_op(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Inductor's keys leave out how wide vectors are: each width has a cache of its own."""
    cache = getattr(request.config, "cache", None)
    folder = cache.mkdir(f"inductor-{torch.backends.cpu.get_cpu_capability()}") if cache else tmp_path
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    compiled = compile_ops(torch_ops.make_ops())
    gate_up = torch.randn(9, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(compiled.silu_mul(gate_up), torch_ops.make_ops().silu_mul(gate_up))
