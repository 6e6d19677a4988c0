"""Every kernel against its slow twin on this device, in every dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels import reference, sampling
from kernels.shared_prefixes import SharedPrefixes
from kernels.store_kv import FP8
from kernels.triton.add_rms_norm import add_rms_norm
from kernels.triton.attention_plan import AttentionPlan
from kernels.triton.bench.batches import make_attention, make_shared_attention
from kernels.triton.bench.timing import Bench
from kernels.triton.cascade_attention import cascade_attention
from kernels.triton.lm_head_sample import lm_head_sample
from kernels.triton.norm_rope_store import norm_rope_store
from kernels.triton.paged_attention import paged_attention
from kernels.triton.rms_norm import rms_norm
from kernels.triton.sampling import draw_filtered, draw_full, draw_greedy
from kernels.triton.silu_mul import silu_mul
from kernels.triton.token_bitmask import apply_bitmask

TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
BITS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}
Pair = tuple[str, Tensor, Tensor]


def check_kernels(bench: Bench) -> list[dict[str, Any]]:
    """One entry a kernel and dtype: the largest error, what is allowed, and whether it is."""
    dtypes = (torch.float32,) if bench.is_smoke else tuple(TOLERANCE)
    found = []
    for dtype in dtypes:
        for make in (_check_rows, _check_attention):
            found += [_compare(name, dtype, *pair) for name, *pair in make(bench, dtype)]
    return found + [_compare(name, torch.float32, *pair) for name, *pair in _check_sampling(bench)]


def _compare(name: str, dtype: torch.dtype, actual: Tensor, expected: Tensor) -> dict[str, Any]:
    """An integer result must be equal; a float one may differ by the tolerance, times its size where above 1."""
    difference = (actual.double() - expected.double()).abs() / expected.double().abs().clamp(min=1.0)
    error = float(difference.nan_to_num(nan=torch.inf).max()) if difference.numel() else 0.0
    allowed = TOLERANCE[dtype] if actual.is_floating_point() else 0.0
    return {
        "name": name,
        "dtype": str(dtype),
        "error": error,
        "allowed": allowed,
        "is_right": error <= allowed,
    }


def _check_rows(bench: Bench, dtype: torch.dtype) -> Iterator[Pair]:
    generator = torch.Generator().manual_seed(0)

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(bench.device, dtype)

    x, weight = make(7, 1000), make(1000)
    yield "rms_norm", rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6)
    residual = make(7, 1000)
    twin = residual.clone()
    yield (
        "add_rms_norm",
        add_rms_norm(x, residual, weight, 1e-6)[0],
        reference.add_rms_norm(x, twin, weight, 1e-6)[0],
    )
    gate_up = make(7, 2 * 1025)
    yield "silu_mul", silu_mul(gate_up), reference.silu_mul(gate_up)
    heads, norm, angles = make(9, 16 + 16, 128), make(24, 128), make(9, 1, 64).float()
    cos, sin = torch.cat((angles.cos(), angles.cos()), -1), torch.cat((-angles.sin(), angles.sin()), -1)
    slots = torch.randperm(64, generator=generator)[:9].to(bench.device)
    keys, values, k_twin, v_twin = torch.zeros(4, 4, 16, 8, 128, device=bench.device, dtype=dtype)
    queries = norm_rope_store(heads, norm, 1e-6, cos, sin, keys, values, slots, 16)
    expected = reference.norm_rope_store(heads, norm, 1e-6, cos, sin, k_twin, v_twin, slots, 16)
    yield "norm_rope_store queries", queries, expected
    yield "norm_rope_store keys", keys, k_twin
    yield "norm_rope_store values", values, v_twin


def _check_attention(bench: Bench, dtype: torch.dtype) -> Iterator[Pair]:
    cases: list[tuple[str, tuple[int, int, int], dict[str, Any]]] = [
        ("decode", (3, 1, bench.pick(1100, 40)), {}),
        ("drafts", (2, 5, bench.pick(700, 33)), {}),
        ("prefill", (2, bench.pick(150, 20), bench.pick(150, 20)), {}),
        ("chunk", (1, bench.pick(100, 20), bench.pick(300, 37)), {}),
        ("window", (2, 1, bench.pick(900, 40)), {"sliding_window": bench.pick(300, 17)}),
        ("soft cap", (2, 1, 50), {"soft_cap": 5.0}),
    ]
    for name, sizes, options in cases:
        batch = make_attention(
            bench, *sizes, num_heads=10, num_kv_heads=2, head_dim=bench.pick(128, 16), dtype=dtype
        )
        yield f"paged_attention {name}", *_attend(batch.tensors, options, batch.plan)
    yield from _check_cascade(bench, dtype)
    if dtype == torch.bfloat16:
        batch = make_attention(bench, 2, 1, 300, dtype=dtype, cache_dtype=FP8)
        yield "paged_attention fp8", *_attend(batch.tensors, {}, batch.plan)


def _check_cascade(bench: Bench, dtype: torch.dtype) -> Iterator[Pair]:
    """Shared keys against the slow twin, and against the plain kernels, of which they must be the same bits."""
    context, shared_len = bench.pick(1300, 40), bench.pick(1088, 16)
    batch, shared = make_shared_attention(bench, 6, context, shared_len, 10, 2, bench.pick(128, 16), dtype)
    actual = cascade_attention(*batch.tensors, shared, scale=0.1, plan=batch.plan)
    plain = paged_attention(*batch.tensors, scale=0.1, plan=AttentionPlan([1] * 6, [context] * 6))
    yield "cascade_attention bits", actual.view(BITS[dtype]).cpu(), plain.view(BITS[dtype]).cpu()
    q, k_cache, v_cache, tables, query_start_loc, seq_lens = (each.cpu() for each in batch.tensors)
    on_host = SharedPrefixes.view(shared.packed.cpu(), len(shared.members))
    yield (
        "cascade_attention",
        actual.cpu(),
        reference.cascade_attention(
            q, k_cache.float(), v_cache.float(), tables, query_start_loc, seq_lens, on_host, scale=0.1
        ),
    )


def _attend(tensors: tuple[Tensor, ...], options: dict[str, Any], plan: Any) -> tuple[Tensor, Tensor]:
    q, k_cache, v_cache, *rest = tensors
    actual = paged_attention(q, k_cache, v_cache, *rest, scale=0.1, plan=plan, **options)  # type: ignore[call-arg, arg-type]
    # The twin's loops read values one by one, which a device answers slowly.
    host = [each.cpu() for each in (q, k_cache.float(), v_cache.float(), *rest)]
    return actual.cpu(), reference.paged_attention(*host, scale=0.1, **options)  # type: ignore[arg-type]


def _check_sampling(bench: Bench) -> Iterator[Pair]:
    """Tokens must be those that torch draws on the host."""
    num_rows, vocab_size = bench.pick(64, 3), bench.pick(20000, 50)
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(1)) * 4
    keys = torch.from_numpy(sampling.make_row_keys(np.arange(num_rows), np.arange(num_rows)))
    temperature, top_p = torch.linspace(0.3, 1.5, num_rows), torch.linspace(0.1, 0.99, num_rows)
    top_k, off = torch.arange(num_rows) * 7 + 2, torch.full((num_rows,), -torch.inf)
    everything = torch.full((num_rows,), vocab_size)
    rows: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[Any, ...]]] = {
        "draw_greedy": (draw_greedy, sampling.draw_greedy, (logits,)),
        "draw_full": (draw_full, sampling.draw_full, (logits, keys, temperature, None)),
        "draw_full min-p": (
            draw_full,
            sampling.draw_full,
            (logits, keys, temperature, off.clone().fill_(-2.0)),
        ),
        "draw_filtered k": (
            draw_filtered,
            sampling.draw_filtered,
            (logits, keys, temperature, top_k, top_p * 0 + 2, off, vocab_size),
        ),
        "draw_filtered p": (
            draw_filtered,
            sampling.draw_filtered,
            (logits, keys, temperature, everything, top_p, off, vocab_size),
        ),
    }
    for name, (fast, slow, arguments) in rows.items():
        moved = (each.to(bench.device) if isinstance(each, Tensor) else each for each in arguments)
        yield name, fast(*moved).cpu(), slow(*arguments)
    hidden = torch.randn(17, bench.pick(1024, 16), generator=torch.Generator().manual_seed(2))
    weight = torch.randn(vocab_size, hidden.shape[1], generator=torch.Generator().manual_seed(3))
    head = (hidden, weight, keys[:1].expand(17, 2).contiguous(), torch.linspace(0.0, 1.5, 17))
    drawn = lm_head_sample(*(each.to(bench.device) for each in head))
    yield "lm_head_sample", drawn.cpu(), reference.lm_head_sample(*head)
    bitmask = torch.randint(-(2**31), 2**31, (2, -(-vocab_size // 32))).int()
    masked, rows_of = logits.to(bench.device), torch.tensor([1, 0])
    apply_bitmask(masked, bitmask.to(bench.device), rows_of.to(bench.device))
    reference.apply_bitmask(logits, bitmask, rows_of)
    yield "apply_bitmask", masked.cpu().isinf().long(), logits.isinf().long()
