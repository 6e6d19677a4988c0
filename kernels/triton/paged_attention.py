"""Attention of a flattened batch over paged keys and values: decode, drafts, prefill and any mix of them."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from kernels.ops import StepShape
from kernels.triton.attention_long import long_attention_kernel
from kernels.triton.attention_plan import SHORT_LIMIT, AttentionPlan
from kernels.triton.attention_short import fold_splits_kernel, short_attention_kernel
from kernels.triton.launch import (
    FUSED,
    check_contiguous,
    check_float,
    check_rows,
    check_shape,
    make_output,
    next_power_of_2,
)
from kernels.triton.tiles import WIDE_DIM, Tiles, choose_tiles, limit_short_rows

# Parts that a context is cut into at most.
MAX_SPLITS = 16
# Programs a context gets at least where it may be cut into twice as many parts: else one long context in a full batch
# is read by one program after the other while the device idles (modelled, not measured).
MIN_PROGRAMS = 4
MAX_WIDE_ROWS = 16  # of any tile of wide heads
# Scratch of a step's drafts at most: where their parts would take more, one program does all parts of its tile.
MAX_DRAFT_BYTES = 2**28


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    plan: AttentionPlan | None = None,
    tiles: Tiles | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Implement `kernels.ops.PagedAttention`; the order of a request's sums depends on its own lengths alone.

    Args:
        q: tokens may be further apart than their size.
        tiles: default: those of the layer's shape.
        out: written and returned when given.

    Source: Kwon et al., 2023 (PagedAttention); split over context after FlashDecoding.
    """
    _check(q, k_cache, v_cache, block_tables, query_start_loc, seq_lens, sliding_window)
    if plan is None:
        plan = AttentionPlan(query_start_loc.diff().tolist(), seq_lens.tolist())
    tiles = tiles or choose_tiles(k_cache.element_size(), q.shape[2])
    if q.shape[2] > WIDE_DIM and k_cache.shape[2] == 1 and q.shape[1] > MAX_WIDE_ROWS:
        # One program has no room for more heads, though they share their keys.
        caches = (k_cache, v_cache, block_tables, query_start_loc, seq_lens)
        rest: dict[str, Any] = {"scale": scale, "plan": plan, "tiles": tiles}
        parts = [paged_attention(heads, *caches, **rest) for heads in q.split(MAX_WIDE_ROWS, dim=1)]
        return torch.cat(parts, dim=1, out=out)
    result = make_output(out, tuple(q.shape), q)
    is_fp8 = k_cache.dtype == torch.float8_e4m3fn
    if is_fp8:
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    call = _Call(
        result, q, k_cache, v_cache, block_tables, query_start_loc, seq_lens, tiles, scale, soft_cap,
        sinks, sliding_window or 0, is_fp8,
    )  # fmt: skip
    if plan.has_decodes:
        call.attend_decodes(plan)
    if plan.max_draft_len:
        call.attend_drafts(plan)
    if plan.has_long:
        call.attend_long(plan)
    return result


def estimate_scratch(shape: StepShape) -> int:
    """Return the bytes of parts of sums that a step takes at most, with contexts of any length."""
    row_bytes = _measure_parts(shape.num_heads * MAX_SPLITS, shape.head_dim)
    num_draft_tokens = min(shape.num_tokens, shape.num_requests * SHORT_LIMIT)
    return shape.num_requests * row_bytes + min(num_draft_tokens * row_bytes, MAX_DRAFT_BYTES)


def _measure_parts(num_parts: int, head_dim: int) -> int:
    return num_parts * (head_dim + 2) * torch.float32.itemsize


class _Call:
    """The tensors and sizes that the launches of one call share."""

    def __init__(
        self,
        out: Tensor,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        tiles: Tiles,
        scale: float,
        soft_cap: float | None,
        sinks: Tensor | None,
        window: int,
        is_fp8: bool,
    ) -> None:
        self._out, self._q = out, q
        self._inputs = (q, k_cache, v_cache, block_tables, query_start_loc, seq_lens)
        self._lengths = (query_start_loc, seq_lens)
        self._strides = (q.stride(0), block_tables.stride(0))
        self._factors = (scale, soft_cap or 1.0)
        self._tiles = tiles
        self._num_heads, self._head_dim = q.shape[1], q.shape[2]
        self._num_kv_heads = k_cache.shape[2]
        self._group = self._num_heads // self._num_kv_heads
        self._window = window
        if sinks is not None:
            check_shape("sinks", sinks, (self._num_heads,))
        # Kernels without sinks do not read it.
        self._sinks = seq_lens if sinks is None else sinks
        self._sizes = {
            "NUM_HEADS": self._num_heads,
            "NUM_KV_HEADS": self._num_kv_heads,
            "HEAD_DIM": self._head_dim,
            "BLOCK_DIM": max(16, next_power_of_2(self._head_dim)),
            "BLOCK_SIZE": k_cache.shape[1],
            "HAS_SOFT_CAP": soft_cap is not None,
            "HAS_SINKS": sinks is not None,
            "IS_FP8": is_fp8,
        }

    def attend_decodes(self, plan: AttentionPlan) -> None:
        """Requests with one new token each."""
        self._attend_short(plan, (1, 1), 1)

    def attend_drafts(self, plan: AttentionPlan) -> None:
        """Requests with a few; the tile has room for as many as there may be, whatever their number now."""
        self._attend_short(plan, (2, SHORT_LIMIT), plan.max_draft_len)

    def _attend_short(self, plan: AttentionPlan, limits: tuple[int, int], max_query_len: int) -> None:
        tile = self._tiles.short
        rows = max(tile.block_m, next_power_of_2(self._group))
        rows = max(rows, min(limit_short_rows(self._head_dim), next_power_of_2(limits[1] * self._group)))
        block_q = rows // self._group
        min_split = self._tiles.min_split // tile.block_n * tile.block_n
        query_tiles = triton.cdiv(max_query_len, block_q)
        num_units = plan.num_requests * query_tiles * self._num_kv_heads
        max_splits = min(MAX_SPLITS, triton.cdiv(plan.max_seq_len, min_split))
        fewest = MIN_PROGRAMS if max_splits >= 2 * MIN_PROGRAMS else 1
        num_programs = max(fewest, min(max_splits, self._tiles.target_programs // num_units))
        is_draft = limits != (1, 1)
        num_rows = (plan.num_draft_tokens if is_draft else plan.num_requests) * self._num_heads
        if is_draft and _measure_parts(num_rows * max_splits, self._head_dim) > MAX_DRAFT_BYTES:
            num_programs = 1
        num_slots = max_splits if num_programs > 1 else 0
        num_parts = num_rows * num_slots
        scratch = plan.take_scratch(num_parts, self._head_dim, self._out.device)
        splitting = {"MIN_SPLIT": min_split, "MAX_SPLITS": MAX_SPLITS, "BLOCK_N": tile.block_n}
        queries = {"MIN_QUERY": limits[0], "MAX_QUERY": limits[1]}
        shape = splitting | {"BLOCK_M": rows, "num_warps": tile.num_warps, "num_stages": tile.num_stages}
        short_attention_kernel[(num_units, num_programs)](
            self._out,
            *scratch,
            *self._inputs,
            self._sinks,
            *self._strides,
            query_tiles,
            plan.first_draft,
            num_slots,
            *self._factors,
            **(self._sizes | queries | shape | FUSED),
            WINDOW=self._window,
            IS_FOLDED=num_programs == 1,
        )
        if num_programs > 1:
            self._fold(
                plan.num_requests * max_query_len,
                scratch,
                (max_query_len, plan.first_draft, num_slots),
                block_q,
                queries | splitting,
            )

    def _fold(
        self,
        num_queries: int,
        scratch: tuple[Tensor, Tensor],
        sizes: tuple[int, int, int],
        block_q: int,
        constants: dict[str, int],
    ) -> None:
        fold_splits_kernel[(self._num_heads * num_queries,)](
            self._out,
            *scratch,
            *self._lengths,
            self._sinks,
            *sizes,
            NUM_HEADS=self._num_heads,
            HEAD_DIM=self._head_dim,
            BLOCK_DIM=self._sizes["BLOCK_DIM"],
            HAS_SINKS=self._sizes["HAS_SINKS"],
            WINDOW=self._window,
            BLOCK_Q=block_q,
            **constants,
            num_warps=1,
            **FUSED,
        )

    def attend_long(self, plan: AttentionPlan) -> None:
        tile = self._tiles.long
        rows = max(tile.block_m, next_power_of_2(self._group))
        num_tiles = self._q.shape[0] // (rows // self._group) + plan.num_requests
        long_attention_kernel[(self._num_kv_heads * num_tiles,)](
            self._out,
            *self._inputs,
            self._sinks,
            *self._strides,
            plan.num_requests,
            *self._factors,
            **self._sizes,
            WINDOW=self._window,
            SHORT_LIMIT=SHORT_LIMIT,
            BLOCK_M=rows,
            BLOCK_N=tile.block_n,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            **FUSED,
        )


def _check(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    sliding_window: int | None,
) -> None:
    check_float("q", q)
    check_rows("q", q)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_contiguous(name, cache)
        if cache.dtype not in (q.dtype, torch.float8_e4m3fn):
            raise ValueError(f"{name} must be {q.dtype} or float8_e4m3fn, not {cache.dtype}")
    check_shape("v_cache", v_cache, tuple(k_cache.shape))
    if q.shape[2] != k_cache.shape[3] or q.shape[1] % k_cache.shape[2]:
        raise ValueError(f"q {tuple(q.shape)} does not fit a cache of {tuple(k_cache.shape)}")
    check_shape("query_start_loc", query_start_loc, (seq_lens.shape[0] + 1,))
    check_rows("block_tables", block_tables)
    check_shape("block_tables", block_tables, (seq_lens.shape[0], block_tables.shape[1]))
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1, not {sliding_window}")
