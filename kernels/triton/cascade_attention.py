"""Cascade attention: keys that several requests share are attended once, the rest of each request by itself."""

from __future__ import annotations

from torch import Tensor

from kernels.shared_prefixes import SharedPrefixes
from kernels.triton.attention_plan import AttentionPlan
from kernels.triton.paged_attention import paged_attention
from kernels.triton.tiles import TileTable


def cascade_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    shared: SharedPrefixes,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    plan: AttentionPlan | None = None,
    tiles: TileTable | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attend as `kernels.triton.paged_attention` does, with shared keys read once for all who share them.

    Args:
        shared: whose keys are the same; read on the device alone, so that a recorded step sees the next one's.
            Under a sliding window nothing is shared.

    The others are those of `paged_attention`. Returns the same bits as it: both cut a context at the same places
    and add the parts in the same order, so that whether keys are shared never shows in a result.
    Source: the merge of states of FlashInfer, 2024; the fixed borders, which make it exact, are ours.
    """
    if plan is None:
        plan = AttentionPlan(query_start_loc.diff().tolist(), seq_lens.tolist())
    return paged_attention(
        q,
        k_cache,
        v_cache,
        block_tables,
        query_start_loc,
        seq_lens,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        sinks=sinks,
        plan=plan.share(shared),
        tiles=tiles,
        out=out,
    )
