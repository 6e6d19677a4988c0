"""SchedulerState: the waiting and running requests, with their rows and blocks.

A request's status changes only here, so that it always matches: waiting requests have neither row nor blocks, running
requests have both, finished requests are removed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from engine.core.adapter_slots import AdapterSlots
from engine.core.block_transfers import BlockTransfers
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.request import Request, RequestStatus
from engine.core.request_queue import RequestQueue
from engine.core.request_table import RequestTable, SlotPool
from engine.core.step import Batch
from engine.messages import Detail
from engine.outputs import FinishReason
from engine.resolved_config import SchedulerConfig


class SchedulerState:
    """The requests of one engine core."""

    def __init__(
        self, config: SchedulerConfig, kv_cache: KVCacheManager, clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.requests: dict[int, Request] = {}
        self.waiting = RequestQueue(config.policy)
        self.adapters = AdapterSlots(config.max_loras) if config.max_loras else None
        self.table = RequestTable(config.max_num_seqs)
        self.rows = SlotPool(config.max_num_seqs)
        self.num_steps = 0  # planned so far
        self.num_preemptions = 0
        self.dead_ends: Counter[str] = Counter()  # completions by cause
        self.removed_rows: list[int] = []  # freed since the last plan
        self._has_stages = config.num_stages > 1
        self._kv_cache = kv_cache
        self._clock = clock
        self._batch = Batch.make_empty()
        self._is_stale = False  # a request of the batch no longer runs
        self.transfers: BlockTransfers | None = None  # with a store of several cores
        self.on_end: Callable[[Request], None] | None = None  # called with each request that ends

    @property
    def batch(self) -> Batch:
        """The running requests, best queue key first."""
        if self._is_stale:
            self._is_stale = False
            is_running = [request.status is RequestStatus.RUNNING for request in self._batch.requests]
            self._batch = self._batch.select(np.array(is_running, dtype=bool))
        return self._batch

    @property
    def running(self) -> list[Request]:
        return self.batch.requests

    def drain(self, oldest_step: int) -> None:
        """Free the rows and slots that waited for steps before `oldest_step` to end."""
        self.removed_rows += self.rows.drain(oldest_step)
        self.table.slots.drain(oldest_step)
        if self.adapters is not None:
            self.waiting.restore(self.adapters.drain(oldest_step))

    def drain_rows(self, oldest_step: int) -> None:
        """Free the rows alone. The order of waiting requests and the adapters that may run stay the same."""
        self.removed_rows += self.rows.drain(oldest_step)

    def cancel_removal(self, row: int) -> None:
        """Do not report a row that was freed. In a pipeline the row is reported later, which does no harm."""
        if not self._has_stages:
            self.removed_rows.remove(row)

    def peek_waiting(self) -> Request | None:
        """Return the first waiting request whose blocks and adapter are ready."""
        while (request := self.waiting.peek()) is not None and not self._is_ready(request):
            self.waiting.hold()
        return request

    def _is_ready(self, request: Request) -> bool:
        are_blocks_ready = self.transfers is None or self.transfers.may_run(request)
        return are_blocks_ready and (self.adapters is None or self.adapters.may_run(request))

    def peek_admissible(self) -> Request | None:
        """Return the request that would run next, or None if it cannot run now."""
        request = self.peek_waiting() if self.rows.free else None
        # A preempted request waits until its tokens in flight have arrived.
        return None if request is None or request.num_in_flight else request

    def start(self, request: Request, num_cached: int) -> Request:
        """Run the first request of the queue. Its blocks are allocated and contain the first `num_cached` tokens."""
        popped = self.waiting.pop()
        assert popped is request, "nothing enters the queue between `peek_waiting` and `start`"
        if self.adapters is not None:
            self.adapters.enter(request)
        request.row = self.rows.take()
        self._batch = self.batch.add(request)
        request.status = RequestStatus.RUNNING
        self.table.num_computed[request.slot] = num_cached
        self.table.num_kv_slots[request.slot] = self._kv_cache.count_slots(request)
        if request.first_scheduled_time is None:
            request.first_scheduled_time = self._clock()
            request.num_cached_tokens = num_cached
        return request

    def preempt(self, request: Request) -> None:
        """Free all blocks of a request; it keeps its tokens and is queued again under its old key."""
        self._leave(request)
        request.status = RequestStatus.WAITING
        request.restart_prompt_logprobs()
        self.table.num_preemptions[request.slot] += 1
        self.num_preemptions += 1
        self.waiting.push(request)

    def forget(self, request: Request) -> None:
        """Remove a failed request's blocks from the prefix cache: their KV may have caused the failure."""
        self._kv_cache.forget(request)
        if self.transfers is not None:
            self.transfers.forget(request)

    def finish(self, request: Request, finish_reason: FinishReason, **more: Any) -> Detail:
        """End a request and return its last Detail. Its tokens in flight are dropped when they arrive.

        The slot is freed after the last planned step, which still counts tokens there.
        """
        if request.status is RequestStatus.RUNNING:
            self._leave(request)
        elif request.handle in self.waiting:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED
        self.table.needs_detail[request.slot] = True
        self.table.slots.release(request.slot, after_step=self.num_steps - 1)
        del self.requests[request.handle]
        if self.on_end is not None:
            self.on_end(request)
        drafts = {} if request.drafts is None else request.drafts.count()
        return request.make_detail(finish_reason=finish_reason, drafts=drafts, **more)

    def _leave(self, request: Request) -> None:
        """Remove the request from the batch; its computed blocks stay in the prefix cache.

        The last token is left out, because a planned run may still be skipped and its KV be missing.
        """
        table, slot = self.table, request.slot
        self._kv_cache.commit(request, min(request.num_computed_tokens, request.num_tokens - 1))
        self._kv_cache.free(request)
        if self.adapters is not None:
            self.adapters.leave(request, self.num_steps - 1)
        table.num_computed[slot] = table.num_kv_slots[slot] = 0
        # A row that waits for its mask still needs its sampling state, and so does one in a later stage of a pipeline.
        is_parked = self._has_stages or (request.has_grammar and request.num_in_flight > 0)
        self.rows.release(request.row, after_step=self.num_steps - 1 if is_parked else None)
        if not is_parked:
            self.removed_rows.append(request.row)
        request.row = -1
        self._is_stale = True
