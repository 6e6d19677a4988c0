"""Scheduler: decides for each step which requests compute how many tokens.

    waiting ──admit (blocks for the whole prompt)──▶ running ──stop, length, abort, error──▶ finished
       ▲                                               │
       └────────── preempt (blocks taken back) ────────┘

`num_planned` counts a request's tokens, known or in flight; steps raise `num_computed` until it reaches that. A step
has one token budget, which running requests use first. Steps overlap: the next one is planned while the last one
runs. Running requests are sorted by the queue key, so the last one is preempted first. The common case is computed
for all requests at once in arrays (RequestTable); only special rows, e.g. those that need a block, take a loop.
SchedulerState holds the queues and rows.
"""

from __future__ import annotations

import math
import time
from bisect import bisect
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import attrgetter

import numpy as np

from engine.core.actor_messages import (
    AdapterReady,
    BlockMove,
    FindDrafts,
    StateSave,
    StepDone,
    StepPlan,
)
from engine.core.answer_reader import AnswerReader
from engine.core.draft_steps import DraftSteps
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.request import Request
from engine.core.request_table import RequestTable
from engine.core.scheduler_state import SchedulerState
from engine.core.step import MAX_SCORED_TOKENS, Batch, StepChanges, StepRecord
from engine.messages import AddRequest, NewTokens
from engine.outputs import FinishReason
from engine.resolved_config import SchedulerConfig
from engine.spec.draft_planner import DraftPlanner

# Known tokens of the requests that one step admits, cached ones included. Hashing, finding and copying a token takes
# 0.5 us, on the event loop.
MAX_ADMITTED_TOKENS = 65_536
NO_DRAFTS = np.zeros(0, dtype=np.int64)
# Sampled tokens of one request that may not have been read back yet. In a pipeline rank 0 gets no token before the last
# stage has computed the step, so there it is 1.
MAX_IN_FLIGHT = 2
_get_key, _get_reserved = attrgetter("queue_key"), attrgetter("reserved_ids")


class Scheduler:
    """Plans steps and processes their results. Synchronous; one owner."""

    def __init__(
        self, config: SchedulerConfig, kv_cache: KVCacheManager, eos_token_ids: Iterable[int],
        clock: Callable[[], float] = time.monotonic,
        make_drafts: Callable[[RequestTable], DraftPlanner] | None = None,
    ) -> None:
        self.config = config
        self.kv_cache = kv_cache
        self.state = SchedulerState(config, kv_cache, clock)
        self.table = self.state.table
        self._clock = clock
        self.drafts: DraftSteps | None = None
        if make_drafts is not None:
            self.drafts = DraftSteps(make_drafts(self.table), self.state, kv_cache, config.max_model_len)
            self.state.on_end = self.drafts.planner.close
        self._eos_token_ids = frozenset(eos_token_ids)
        self._reader = AnswerReader(self.state, self._eos_token_ids)
        self._steps: dict[int, StepRecord] = {}  # by step_id, in order
        self.num_open_steps = 0  # steps whose forward pass has no result yet
        self._max_in_flight = 1 if config.num_stages > 1 else MAX_IN_FLIGHT

    def __contains__(self, handle: int) -> bool:
        return handle in self.state.requests

    def add(self, message: AddRequest) -> None:
        """Queue the completions of a request, which has been checked against the model length and the cache size."""
        limit, now = self.config.max_model_len, self._clock()
        for completion in message.completions:
            request = Request(message, completion, self.table, limit, self._eos_token_ids, now)
            self.state.requests[request.handle] = request
            self.state.waiting.push(request)
            if message.params.saves_blocks and self.state.transfers is not None:
                self.state.transfers.report_end(request.handle)
            if self.drafts is not None:
                self.drafts.planner.open(request)

    def take_adapter(self, ready: AdapterReady) -> NewTokens:
        """Take the result of a load; requests whose adapter cannot be used end."""
        assert self.state.adapters is not None, "only then are adapters loaded"
        held = self.state.adapters.note_ready(ready.digest, ready.error is None)
        if ready.error is None:
            self.state.waiting.restore(held)
            return NewTokens()
        return self.abort([request.handle for request in held], "error", ready.error)

    def abort(
        self, handles: Iterable[int], finish_reason: FinishReason = "abort", error: str | None = None
    ) -> NewTokens:
        """End completions, waiting or running. Unknown handles are ignored."""
        known = self.state.requests
        found = [known[handle] for handle in handles if handle in known]
        return NewTokens(
            details=[self.state.finish(request, finish_reason, error=error) for request in found]
        )

    def schedule(self) -> StepPlan | None:
        """Plan the next step. Returns None if there is no work or the maximum number of steps is in flight."""
        if self.num_open_steps >= self.config.max_steps_in_flight:
            return None
        # The stages of a pipeline compute different rows at a time, so a step without rows that wait is no loss.
        must_wait = self.drafts is not None and self.drafts.must_wait(self.num_open_steps)
        if must_wait and self.config.num_stages == 1:
            return None
        oldest_step = next(iter(self._steps), self.state.num_steps)
        self.state.drain(oldest_step)
        changes = StepChanges(admission_room=MAX_ADMITTED_TOKENS)
        num_preemptions = self.state.num_preemptions
        if self.config.policy == "priority":
            self._displace(changes, oldest_step)
        budget = self._plan_running(changes)
        if self.drafts is not None and self.drafts.is_active:
            budget -= self.drafts.add(changes, budget)
        # Preempted requests are admitted in a later step. If none runs, admit now: no later step would be planned.
        if self.state.num_preemptions == num_preemptions or not self.state.running:
            self._admit_waiting(changes, budget)
        return self._make_step(changes)

    def order_drafts(self) -> FindDrafts | None:
        """Return the questions to the grammar thread whose answers the next step waits for; None: there are none."""
        if self.drafts is None or not (targets := self.drafts.planner.take_questions()):
            return None
        return FindDrafts(targets)

    def _plan_running(self, changes: StepChanges) -> int:
        """Schedule the tokens of each running request. Returns the remaining budget."""
        table, batch = self.table, self.state.batch
        slots = batch.slots
        counts = self._count_ready(slots)
        if self.config.num_stages > 1:
            # The stages compute different rows at a time, so each step takes its part of them.
            counts[np.flatnonzero(counts)[-(-len(slots) // self.config.num_stages) :]] = 0
        budget = self.config.max_num_batched_tokens
        chunks = np.flatnonzero(counts > 1).tolist()
        has_follower = bool(chunks) and self._can_admit()
        for index in chunks:
            rest = left = budget - int(counts[:index].sum())
            if self.config.enable_chunked_prefill:
                rest -= len(batch.requests) - index - 1  # leave one token for each running request after it
                if has_follower:
                    rest = min(rest, left // 2)
            start = int(table.num_computed[slots[index]])
            count = min(int(counts[index]), max(1, self._limit_chunk(start, rest)))
            request = batch.requests[index]
            count = changes.limit_scoring(request, count)
            counts[index] = keep_images_whole(request, start, count, left) if request.whole_images else count
        if counts.sum() > budget:
            counts[counts.cumsum() > budget] = 0
        table.num_scheduled[slots] = counts
        ends = table.num_computed[slots] + counts
        is_short = (ends > table.num_kv_slots[slots]) & (counts > 0)
        if is_short.any():
            self._grow(batch, np.flatnonzero(is_short), ends, changes)
        for index in chunks:
            if index < len(self.state.running):
                # Later requests of the same step may already share these blocks: each layer writes before it reads.
                self._commit(batch.requests[index], int(ends[index]))
        return budget - int(table.num_scheduled[self.state.batch.slots].sum())

    def _limit_chunk(self, start: int, count: int) -> int:
        """Return how many of at most `count` tokens from `start` on a step computes.

        In a pipeline, they take as long as the first `count` of a prompt: later tokens attend to more. Chunks of equal
        times keep all stages busy.
        """
        cost = self.config.context_cost
        if self.config.max_chunk_tokens:
            count = min(count, self.config.max_chunk_tokens)
        if not cost or count <= 0:
            return count
        linear = 1 + cost * start
        return int((math.sqrt(linear**2 + 2 * cost * (count + cost * count**2 / 2)) - linear) / cost)

    def _count_ready(self, slots: np.ndarray) -> np.ndarray:
        """Return how many tokens each request could compute now with an unlimited budget."""
        table = self.table
        planned = table.num_planned[slots]
        counts = planned - table.num_computed[slots]
        is_done = table.num_in_flight[slots] >= self._max_in_flight
        is_done |= planned >= table.max_num_tokens[slots]
        if self.drafts is not None and self.drafts.is_active:
            is_done |= self.drafts.find_waiting(slots)
        counts[is_done] = 0
        return counts

    def _count_left(self, num_ahead: int) -> int:
        """Return the budget that remains after the first `num_ahead` running requests."""
        slots = self.state.batch.slots[:num_ahead]
        counts = self._count_ready(slots)
        is_scored = self.table.num_computed[slots] < self.table.score_end[slots]
        np.minimum(counts, MAX_SCORED_TOKENS, out=counts, where=is_scored)
        return self.config.max_num_batched_tokens - int(counts.sum())

    def _fits_budget(self, request: Request, budget: int) -> bool:
        """Return whether the budget suffices to start the request: without chunked prefill, for its whole prompt."""
        if self.config.enable_chunked_prefill:
            return budget > 0 and budget >= max((end - start for start, end in request.whole_images), default=0)
        return self.kv_cache.count_uncached(request) <= budget

    def _can_admit(self) -> bool:
        """Return whether a row and enough blocks are free for the first waiting request."""
        request = self.state.peek_admissible()
        return request is not None and self.kv_cache.would_fit(request, ())

    def _grow(self, batch: Batch, short: np.ndarray, ends: np.ndarray, changes: StepChanges) -> None:
        """Allocate blocks for these requests: one for a decode, the next chunk's for a prefill that lacks them."""
        requests = list(map(batch.requests.__getitem__, short.tolist()))
        num_missing = ends[short] - self.table.num_kv_slots[batch.slots[short]]
        has_prefill = (num_missing > 1).any() or any(map(_get_reserved, requests))
        fresh = None if has_prefill else self.kv_cache.grow_each(requests)
        if fresh is not None:
            changes.new_blocks += zip(batch.rows[short].tolist(), fresh, strict=True)
            self.table.num_kv_slots[batch.slots[short]] += self.kv_cache.block_size
            return
        for index, request in zip(short.tolist(), requests, strict=True):
            if index < len(self.state.running):  # otherwise it was preempted for an earlier request
                self._make_room(request, int(ends[index]), changes)

    def _make_room(self, request: Request, num_tokens: int, changes: StepChanges) -> None:
        """Allocate blocks for `num_tokens` tokens. Preempts the last running requests, if needed this one too."""
        while (fresh := self.kv_cache.grow(request, num_tokens)) is None:
            victim = self.state.running[-1]
            row = victim.row
            self.state.preempt(victim)
            if changes.drop_row(row):
                self.state.cancel_removal(row)  # the worker has never seen the row
            if victim is request:
                return
        changes.new_blocks.append((request.row, fresh))
        self.table.num_kv_slots[request.slot] = self.kv_cache.count_slots(request)

    def _admit_waiting(self, changes: StepChanges, budget: int) -> None:
        while changes.admission_room > 0 and (request := self.state.peek_admissible()) is not None:
            if not self._fits_budget(request, budget):
                return
            if self.kv_cache.states is not None and self.kv_cache.waits_for_sibling(request):
                return
            num_cached = self.kv_cache.admit(request)
            if num_cached is None:
                return
            changes.add_row(self.state.start(request, num_cached))
            room = max(1, self._limit_chunk(num_cached, budget))
            count = changes.limit_scoring(request, min(request.num_tokens - num_cached, room))
            if request.whole_images:
                count = keep_images_whole(request, num_cached, count, budget)
            budget -= count
            self.table.num_scheduled[request.slot] = count
            self._commit(request, num_cached + count)

    def _commit(self, request: Request, num_tokens: int) -> None:
        """Add planned blocks to the prefix cache, and save them if others may need them."""
        self.kv_cache.commit(request, num_tokens)
        if self.state.transfers is not None:
            self.state.transfers.save(request)

    def _displace(self, changes: StepChanges, oldest_step: int) -> None:
        """Preempt running requests for waiting requests of higher priority."""
        state = self.state
        while changes.admission_room > 0 and (request := state.peek_waiting()) is not None and state.running:
            if request.num_in_flight or request.queue_key >= state.running[-1].queue_key:
                return
            place = bisect(state.running, request.queue_key, key=_get_key)
            if not self._fits_budget(request, self._count_left(place)):
                return
            worse = state.running[place:]
            will_fit = False
            while (num_cached := self.kv_cache.admit(request) if state.rows.free else None) is None:
                if state.rows.draining and not state.rows.free:
                    return  # the row of an earlier victim will be free soon
                will_fit = will_fit or self.kv_cache.would_fit(request, worse)
                if not will_fit:
                    return
                state.preempt(worse.pop())
                state.drain_rows(oldest_step)  # not the adapters: the request must keep the slot of its own
            changes.add_row(state.start(request, num_cached))

    def _make_step(self, changes: StepChanges) -> StepPlan | None:
        """Make the plan of the scheduled tokens, and count them as computed and sampled.

        A run that reaches the request's last token, known or in flight, samples a new one.
        """
        table, batch = self.table, self.state.batch
        counts = table.num_scheduled[batch.slots]
        if not counts.all():
            batch, counts = batch.select(counts > 0), counts[counts > 0]
        if not batch.requests:
            return None
        slots = batch.slots
        starts = table.num_computed[slots]
        ends = starts + counts
        drafts: list[Sequence[int]] = []
        num_samples = (ends == table.num_planned[slots]).astype(np.int64)
        if changes.drafts:
            drafts = [
                changes.drafts[slot].token_ids if slot in changes.drafts else () for slot in slots.tolist()
            ]
            num_drafts = np.array([len(each) for each in drafts], dtype=np.int64)
            num_samples = np.where(ends - num_drafts == table.num_planned[slots], 1 + num_drafts, 0)
        num_wanted = None if self.drafts is None else self.drafts.count_wanted(batch, ends, changes)
        is_gated = (num_samples > 0) & (table.has_grammar[slots] > 0)
        gated = np.flatnonzero(is_gated)
        table.num_computed[slots] = ends
        table.num_planned[slots] += num_samples
        table.num_in_flight[slots] += num_samples
        saves: list[StateSave] = []
        if self.kv_cache.states is not None:
            saves = self.kv_cache.plan_saves(batch.requests, starts, ends)
        if saves and self.state.transfers is not None:
            self.state.transfers.save_states(batch.requests, saves)
        if self.drafts is not None:
            saves += self.drafts.list_saves(batch, starts, changes.drafts)
        moves: list[BlockMove] = []
        block_saves: list[BlockMove] = []
        if self.kv_cache.tier is not None:
            if self.state.transfers is not None:
                self.state.transfers.note_plan(self.state.num_steps)
            moves, block_saves = self.kv_cache.tier.take_moves(self.state.num_steps)
        removed_rows, self.state.removed_rows = self.state.removed_rows, []
        plan = StepPlan(
            step_id=self.state.num_steps,
            removed_rows=removed_rows,
            new_rows=changes.new_rows,
            new_blocks=changes.new_blocks,
            rows=batch.rows,
            starts=starts,
            num_scheduled_tokens=counts,
            num_samples=num_samples,
            is_gated=is_gated,
            draft_token_ids=np.array(list(chain.from_iterable(drafts)), dtype=np.int64)
            if drafts
            else NO_DRAFTS,
            gated_handles=[batch.handles[index] for index in gated.tolist()],
            num_wanted=num_wanted,
            saves=saves,
            block_moves=moves,
            block_saves=block_saves,
        )
        num_preemptions = table.num_preemptions[slots]
        self._steps[plan.step_id] = StepRecord(
            *(plan.step_id, batch, counts, num_preemptions, num_samples, gated, changes.drafts),
            is_waiting=self.drafts is not None and self.drafts.is_active,
        )
        self.num_open_steps += 1
        self.state.num_steps += 1
        return plan

    def update(self, done: StepDone) -> NewTokens:
        """Process a step's result: append tokens and end finished requests."""
        step = self._steps[done.step_id]
        self.num_open_steps -= not step.is_answered
        if self.kv_cache.tier is not None:
            self.kv_cache.tier.end_step(done.step_id)
        if self.state.transfers is not None:
            self.state.transfers.end_step(done.step_id)
        if self.drafts is not None:
            self.drafts.settle(step, done)
        news = self._reader.read(step, done)
        if self.drafts is not None:
            self.drafts.take(step, done)
        if done.is_last:
            if len(step.gated):  # rows that ended before their mask arrived
                step.take_back_samples(self.table, step.gated)
            del self._steps[step.step_id]
            if self.drafts is not None:
                self.drafts.end(step)
        return news


def keep_images_whole(request: Request, start: int, count: int, most: int) -> int:
    """Return about `count` tokens from `start` on that divide no image: fewer, or all of a first image if it fits."""
    for first, end in request.whole_images:
        if first < start + count < end:
            if first > start:
                return first - start
            return end - start if end - start <= most else 0
    return count
