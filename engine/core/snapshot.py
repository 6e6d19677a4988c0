"""Snapshots of the requests and their KV blocks, for the user interface."""

from __future__ import annotations

import time

from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.outputs import EngineSnapshot, Phase, RequestView


def take_snapshot(scheduler: Scheduler, with_blocks: bool = True) -> EngineSnapshot:
    """Copy the state of scheduler and block pool. Without block ids the copy is several times faster."""
    now, pool = time.monotonic(), scheduler.kv_cache.pool
    waiting = sorted(scheduler.state.waiting.requests(), key=lambda request: request.queue_key)
    views = [_view(request, now, True, with_blocks) for request in scheduler.state.running]
    views += [_view(request, now, False, with_blocks) for request in waiting]
    return EngineSnapshot(
        requests=tuple(views), num_blocks=pool.num_blocks, block_size=scheduler.kv_cache.block_size,
        cached_block_ids=tuple(pool.cached_ids()) if with_blocks else (),
        max_num_seqs=scheduler.config.max_num_seqs,
        max_num_batched_tokens=scheduler.config.max_num_batched_tokens,
    )


def _view(request: Request, now: float, is_running: bool, with_blocks: bool) -> RequestView:
    if not is_running:
        phase: Phase = "preempted" if request.num_preemptions else "queued"
    elif request.num_computed_tokens < request.num_prompt_tokens:
        phase = "prefill"
    else:
        phase = "decode"
    return RequestView(
        handle=request.handle,
        request_id=request.request_id,
        phase=phase,
        age_s=now - request.arrival_time,
        priority=request.priority,
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=request.num_output_tokens,
        num_computed_tokens=request.num_computed_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_preemptions=request.num_preemptions,
        has_grammar=request.has_grammar,
        adapter="" if request.adapter is None else request.adapter.name,
        block_ids=tuple(filter(None, request.block_ids + request.reserved_ids)) if with_blocks else (),
    )
