"""Each kernel at the sizes of a Qwen3-0.6B step: its time, and its share of what the device can do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels.torch.elementwise import FP8
from kernels.triton.add_rms_norm import add_rms_norm
from kernels.triton.attention_plan import AttentionPlan
from kernels.triton.norm_rope_store import norm_rope_store
from kernels.triton.paged_attention import paged_attention
from kernels.triton.rms_norm import rms_norm
from kernels.triton.sampling import draw_filtered, draw_full, draw_greedy
from kernels.triton.silu_mul import silu_mul
from kernels.triton.token_bitmask import apply_bitmask
from tests.measure.gpu_day.kernels.batches import AttentionBatch, make_attention
from tests.measure.gpu_day.kernels.timing import Bench


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table before it is timed."""

    name: str
    work: Callable[[], object]
    num_bytes: int = 0  # read and written at least
    num_flops: int = 0


def measure_table(bench: Bench, ceilings: dict[str, Any]) -> list[dict[str, Any]]:
    """Time every kernel.

    Args:
        ceilings: from `measure_ceilings`.
    """
    found = []
    for make in (_list_attention, _list_sampling, _list_row_kernels):
        for row in make(bench):
            seconds = bench.time(row.work)
            found.append(
                {
                    "name": row.name,
                    "us": seconds * 1e6,
                    "share_of_copy": row.num_bytes / seconds / ceilings["copy_bytes_per_s"],
                    "share_of_gemm": row.num_flops / seconds / ceilings["gemm_flops_per_s"],
                }
            )
    return found


def _list_row_kernels(bench: Bench) -> Iterator[Row]:
    width, inner, heads, kv_heads, dim = (
        bench.pick(1024, 64),
        bench.pick(3072, 96),
        16,
        8,
        bench.pick(128, 16),
    )

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, device=bench.device, dtype=bench.dtype)

    for tokens in (bench.pick(256, 2), bench.pick(16384, 4)):
        x, residual, weight = make(tokens, width), make(tokens, width), make(width)
        size = x.numel() * x.element_size()
        yield Row(f"rms_norm {tokens}x{width}", lambda: rms_norm(x, weight, 1e-6), 2 * size)  # noqa: B023
        yield Row(
            f"add_rms_norm {tokens}x{width}",
            lambda: add_rms_norm(x, residual, weight, 1e-6),  # noqa: B023
            4 * size,
        )
        gate_up = make(tokens, 2 * inner)
        yield Row(
            f"silu_mul {tokens}x{inner}",
            lambda: silu_mul(gate_up),  # noqa: B023
            3 * gate_up.numel() // 2 * x.element_size(),
        )
        projected, norm = make(tokens, heads + 2 * kv_heads, dim), make(heads + kv_heads, dim)
        cos, sin = (
            torch.ones(tokens, 1, dim, device=bench.device),
            torch.ones(tokens, 1, dim, device=bench.device),
        )
        keys, values = (make(tokens // 16 + 2, 16, kv_heads, dim) for _ in range(2))
        slots = torch.randperm(tokens, device=bench.device) + 16
        yield Row(
            f"norm_rope_store {tokens}x{heads + 2 * kv_heads}x{dim}",
            lambda: norm_rope_store(projected, norm, 1e-6, cos, sin, keys, values, slots, heads),  # noqa: B023
            2 * projected.numel() * x.element_size() + 8 * tokens * dim,
        )


def _list_attention(bench: Bench) -> Iterator[Row]:
    sizes = [(256, 1, 1024), (64, 1, 4096), (1, 1, 1024), (1, 1, 32768), (32, 4, 1024), (8, 512, 512)]
    for requests, query_len, context in (
        [*sizes, (1, 4096, 4096)] if not bench.is_smoke else [(2, 1, 33), (1, 20, 20)]
    ):
        for heads in (16, 40) if not bench.is_smoke else (2,):
            kv_heads, dim = bench.pick(8, 1), bench.pick(128, 16)
            batch = make_attention(bench, requests, query_len, context, heads, kv_heads, dim)
            yield _make_row(
                f"attention {requests}x{query_len} of {context}, {heads} heads", batch, batch.plan
            )
    if not bench.is_smoke:
        batch = make_attention(bench, 256, 1, 1024, cache_dtype=FP8)
        yield _make_row("attention 256x1 of 1024, fp8 cache", batch, batch.plan)


def _make_row(name: str, batch: AttentionBatch, plan: AttentionPlan) -> Row:
    work = partial(paged_attention, *batch.tensors, scale=0.1, plan=plan)
    return Row(name, work, batch.num_bytes, batch.num_flops)


def _list_sampling(bench: Bench) -> Iterator[Row]:
    vocab_size = bench.pick(151936, 40)
    for rows in (bench.pick(1, 1), bench.pick(256, 2)):
        logits = torch.randn(rows, vocab_size, device=bench.device) * 4
        size = 4 * logits.numel()
        keys = torch.zeros(rows, 2, dtype=torch.int32, device=bench.device)
        ones = torch.ones(rows, device=bench.device)
        k50 = torch.full((rows,), min(50, vocab_size - 1), device=bench.device)
        everything = torch.full((rows,), vocab_size, device=bench.device)
        off = torch.full((rows,), -torch.inf, device=bench.device)
        words = torch.full((rows, -(-vocab_size // 32)), 0x55555555, dtype=torch.int32, device=bench.device)
        name = f"{rows}x{vocab_size}"
        yield Row(f"draw_greedy {name}", lambda: draw_greedy(logits), size)  # noqa: B023
        yield Row(f"draw_full {name}", lambda: draw_full(logits, keys, ones, None), 2 * size)  # noqa: B023
        for kind, top_k in (("k=50 p=0.9", k50), ("p=0.9", everything)):
            work = partial(draw_filtered, logits, keys, ones, top_k, ones * 0.9, off)
            yield Row(f"draw_filtered {name} {kind}", work, 3 * size)
        yield Row(f"apply_bitmask {name}", lambda: apply_bitmask(logits, words), size // 2)  # noqa: B023
