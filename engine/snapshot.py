"""EngineSnapshot: which requests are where and who owns which KV block, at one moment; for people who look on.

Taken on the event loop between two messages, so it is consistent; nothing in it refers back to the engine.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from engine.core.block_pool import BlockPool
from engine.core.request import Request
from engine.core.scheduler import Scheduler

Phase = Literal["queued", "prefill", "decode", "preempted"]


@dataclass(frozen=True, slots=True)
class RequestView:
    """One request that has not ended. Counts are tokens."""

    request_id: str
    phase: Phase
    age_s: float
    priority: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    has_grammar: bool
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """All requests, running ones first, and the cache's blocks; block 0 is never used."""

    requests: tuple[RequestView, ...]
    num_blocks: int
    block_size: int
    cached_block_ids: tuple[int, ...]  # those a prefix can be found in, owned or not
    max_num_seqs: int
    max_num_batched_tokens: int


def take_snapshot(
    machine: Scheduler, pool: BlockPool, block_size: int, with_blocks: bool = True
) -> EngineSnapshot:
    """What the scheduler and the block pool hold now; without the ids of blocks it costs a tenth."""
    now = time.monotonic()
    waiting = sorted(machine.state.waiting.requests(), key=lambda request: request.queue_key)
    views = [_view(request, now, True, with_blocks) for request in machine.state.running]
    views += [_view(request, now, False, with_blocks) for request in waiting]
    return EngineSnapshot(
        requests=tuple(views),
        num_blocks=pool.num_blocks,
        block_size=block_size,
        cached_block_ids=tuple(pool.cached_ids()) if with_blocks else (),
        max_num_seqs=machine.config.max_num_seqs,
        max_num_batched_tokens=machine.config.max_num_batched_tokens,
    )


def _view(request: Request, now: float, is_running: bool, with_blocks: bool) -> RequestView:
    if not is_running:
        phase: Phase = "preempted" if request.num_preemptions else "queued"
    elif request.num_computed_tokens < request.num_prompt_tokens:
        phase = "prefill"
    else:
        phase = "decode"
    return RequestView(
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
        block_ids=tuple(request.block_ids) if with_blocks else (),
    )
