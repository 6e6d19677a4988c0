"""Scheduler: one step after another, which requests compute how many tokens.

    waiting ──admit (blocks for the whole prompt)──▶ running ──stop, length, abort, error──▶ finished
       ▲                                               │
       └────────── preempt (blocks taken back) ────────┘

Every request has `num_computed` chasing `num_planned`, its tokens known or in flight; a step spends one token
budget, running requests first. Steps overlap: the next one is planned while the last one runs. The running
requests are sorted by the queue key, so the last one is always the victim. What most requests need in most
steps is done for all at once in arrays (RequestTable); only those at a border of something cost a loop. Who waits,
runs and holds what is kept in the SchedulerState.
"""

from __future__ import annotations

import time
from bisect import bisect
from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain

import numpy as np

from engine.config import SchedulerConfig
from engine.core.answer_reader import AnswerReader
from engine.core.batch import Batch
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.request import Request
from engine.core.scheduler_state import SchedulerState
from engine.core.step import MAX_SCORED_TOKENS, StepChanges, StepRecord
from engine.messages import (
    AddRequest,
    FillMasks,
    NewTokens,
    StepDone,
    StepPlan,
)
from engine.outputs import FinishReason
from engine.spec.proposer import Proposer

# Known tokens of the requests that one step admits, however many of them are cached: hashing, finding and copying them
# takes half a microsecond each, on the event loop.
MAX_ADMITTED_TOKENS = 65_536
NO_DRAFTS = np.zeros(0, dtype=np.int64)
MAX_IN_FLIGHT = 2  # sampled tokens of one request that may be on their way back


class Scheduler:
    """Plans steps and takes their answers. Synchronous; one owner.

    Args:
        proposer: drafts tokens; then a step is planned when the last one has been answered.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache: KVCacheManager,
        eos_token_ids: Iterable[int],
        clock: Callable[[], float] = time.monotonic,
        proposer: Proposer | None = None,
    ) -> None:
        self.config = config
        self.kv_cache = kv_cache
        self.state = SchedulerState(config, kv_cache, clock)
        self.table = self.state.table
        self._clock = clock
        self._proposer = proposer
        self._max_open_steps = config.max_steps_in_flight if proposer is None else 1
        self._eos_token_ids = frozenset(eos_token_ids)
        self._reader = AnswerReader(self.state, self._eos_token_ids)
        self._steps: deque[StepRecord] = deque()

    def __contains__(self, handle: int) -> bool:
        return handle in self.state.requests

    @property
    def num_steps(self) -> int:
        """Steps that have been planned."""
        return self.state.num_steps

    @property
    def num_open_steps(self) -> int:
        """Steps whose forward has not come back."""
        return sum(not step.is_answered for step in self._steps)

    @property
    def has_work(self) -> bool:
        return bool(self.state.running) or len(self.state.waiting) > 0

    def add(self, message: AddRequest) -> None:
        """Queue the completions of a request. The front has validated it: it fits the model length and the cache."""
        limit, now = self.config.max_model_len, self._clock()
        for completion in message.completions:
            self.state.add(Request(message, completion, self.table, limit, self._eos_token_ids, now))

    def abort(
        self, handles: Iterable[int], finish_reason: FinishReason = "abort", error: str | None = None
    ) -> NewTokens:
        """End completions wherever they are; unknown ones are ignored."""
        known = self.state.requests
        found = [known[handle] for handle in handles if handle in known]
        return NewTokens(
            details=[self.state.finish(request, finish_reason, error=error) for request in found]
        )

    def schedule(self) -> StepPlan | None:
        """The next step, or None when there is nothing to do or enough is in flight."""
        if self.num_open_steps >= self._max_open_steps:
            return None
        oldest_step = self._steps[0].step_id if self._steps else self.num_steps
        self.state.drain(oldest_step)
        changes = StepChanges(admission_room=MAX_ADMITTED_TOKENS)
        num_preemptions = self.state.num_preemptions
        if self.config.policy == "priority":
            self._displace(changes, oldest_step)
        budget = self._plan_running(changes)
        if self._proposer is not None:
            budget -= self._add_drafts(self._proposer, changes, budget)
        # Preempted requests are admitted in a later step, unless none runs: then no later step would come.
        if self.state.num_preemptions == num_preemptions or not self.state.running:
            self._admit_waiting(changes, budget)
        return self._make_step(changes)

    def order_masks(self) -> FillMasks | None:
        """The masks of one step that can be filled now: all tokens before them are known. None when there are none."""
        waiting: set[int] = set()  # handles whose token of an earlier step is not known
        for step in self._steps:
            if (order := step.order_masks(waiting)) is not None:
                accepted, self._reader.accepted = self._reader.accepted, []
                return FillMasks(step.step_id, accepted, *order)
        return None

    def _plan_running(self, changes: StepChanges) -> int:
        """Give each running request its tokens of this step; returns what is left of the budget."""
        table, batch = self.table, self.state.batch
        slots = batch.slots
        counts = self._count_ready(slots)
        budget = self.config.max_num_batched_tokens
        chunks = np.flatnonzero(counts > 1).tolist()
        has_follower = bool(chunks) and self._can_admit()
        for index in chunks:
            rest = left = budget - int(counts[:index].sum())
            if self.config.enable_chunked_prefill:
                rest -= len(batch) - index - 1  # each running request behind it keeps one token
                if has_follower:
                    rest = min(rest, left // 2)
            count = min(int(counts[index]), max(1, rest))
            counts[index] = changes.limit_scoring(batch.requests[index], count)
        if counts.sum() > budget:
            counts[counts.cumsum() > budget] = 0
        table.num_scheduled[slots] = counts
        ends = table.num_computed[slots] + counts
        is_short = (ends > table.num_kv_slots[slots]) & (counts > 0)
        if is_short.any():
            self._grow(batch, np.flatnonzero(is_short), ends, changes)
        for index in chunks:
            if index < len(self.state.batch):
                # Later requests of this very step may share these blocks: each layer writes before it reads.
                self.kv_cache.commit(batch.requests[index], int(ends[index]))
        return budget - int(table.num_scheduled[self.state.batch.slots].sum())

    def _count_ready(self, slots: np.ndarray) -> np.ndarray:
        """Tokens that each of these requests could compute now, without a budget."""
        table = self.table
        planned = table.num_planned[slots]
        counts = planned - table.num_computed[slots]
        is_done = (table.num_in_flight[slots] >= MAX_IN_FLIGHT) | (planned >= table.max_num_tokens[slots])
        counts[is_done] = 0
        return counts

    def _count_left(self, num_ahead: int) -> int:
        """Tokens of the step that the first running requests leave to the others."""
        slots = self.state.batch.slots[:num_ahead]
        counts = self._count_ready(slots)
        is_scored = self.table.num_computed[slots] < self.table.score_end[slots]
        np.minimum(counts, MAX_SCORED_TOKENS, out=counts, where=is_scored)
        return self.config.max_num_batched_tokens - int(counts.sum())

    def _fits_budget(self, request: Request, budget: int) -> bool:
        """Whether the request may begin with that many tokens; without chunked prefill, compute its whole prompt."""
        if self.config.enable_chunked_prefill:
            return budget > 0
        return self.kv_cache.count_uncached(request) <= budget

    def _can_admit(self) -> bool:
        """Whether there is a row, and blocks, for the first waiting request."""
        request = self.state.peek_admissible()
        return request is not None and self.kv_cache.would_fit(request, ())

    def _grow(self, batch: Batch, short: np.ndarray, ends: np.ndarray, changes: StepChanges) -> None:
        """Blocks for those whose tokens have no place; a decode misses one block, a prefill has all of its own."""
        requests = [batch.requests[index] for index in short.tolist()]
        fresh = self.kv_cache.grow_each(requests)
        if fresh is not None:
            changes.new_blocks += [(r.row, [block_id]) for r, block_id in zip(requests, fresh, strict=True)]
            self.table.num_kv_slots[batch.slots[short]] += self.kv_cache.block_size
            return
        for index, request in zip(short.tolist(), requests, strict=True):
            if index < len(self.state.batch):  # else preempted for one before it
                self._make_room(request, int(ends[index]), changes)

    def _make_room(self, request: Request, num_tokens: int, changes: StepChanges) -> None:
        """Blocks for `num_tokens` tokens, preempting from the back, at the worst the request itself."""
        while (fresh := self.kv_cache.grow(request, num_tokens)) is None:
            victim = self.state.running[-1]
            self.state.preempt(victim)
            if victim is request:
                return
        changes.new_blocks.append((request.row, fresh))
        self.table.num_kv_slots[request.slot] = len(request.block_ids) * self.kv_cache.block_size

    def _admit_waiting(self, changes: StepChanges, budget: int) -> None:
        while changes.admission_room > 0 and (request := self.state.peek_admissible()) is not None:
            if not self._fits_budget(request, budget):
                return
            num_cached = self.kv_cache.admit(request)
            if num_cached is None:
                return
            changes.add_row(self.state.start(num_cached))
            count = changes.limit_scoring(request, min(request.num_tokens - num_cached, budget))
            budget -= count
            self.table.num_scheduled[request.slot] = count
            self.kv_cache.commit(request, num_cached + count)

    def _displace(self, changes: StepChanges, oldest_step: int) -> None:
        """Let better waiting requests take the slots and blocks of worse running ones."""
        state = self.state
        while changes.admission_room > 0 and (request := state.waiting.peek()) is not None and state.running:
            if request.num_in_flight or request.queue_key >= state.running[-1].queue_key:
                return
            place = bisect(state.running, request.queue_key, key=_get_key)
            if not self._fits_budget(request, self._count_left(place)):
                return
            worse = state.running[place:]
            will_fit = False
            while (num_cached := self.kv_cache.admit(request) if state.has_free_row else None) is None:
                if state.rows.num_draining and not state.rows.num_free:
                    return  # the row of an earlier victim is on its way
                will_fit = will_fit or self.kv_cache.would_fit(request, worse)
                if not will_fit:
                    return
                state.preempt(worse.pop())
                state.drain(oldest_step)
            changes.add_row(state.start(num_cached))

    def _add_drafts(self, proposer: Proposer, changes: StepChanges, budget: int) -> int:
        """Let requests try drafts behind their last token, as far as there are free blocks; returns how many."""
        table, num_left = self.table, budget
        for request in self.state.running:
            slot, num_tokens = request.slot, request.num_tokens
            limit = min(num_left, request.max_num_tokens - num_tokens - 1)
            is_ready = table.num_scheduled[slot] == 1 and request.num_computed_tokens + 1 == num_tokens
            if not is_ready or limit < 1:
                continue
            drafts = list(proposer.propose(request, limit))[:limit]
            fresh = self.kv_cache.grow(request, num_tokens + len(drafts))
            if not drafts or fresh is None:
                continue
            if fresh:
                changes.new_blocks.append((request.row, fresh))
                table.num_kv_slots[slot] = len(request.block_ids) * self.kv_cache.block_size
            changes.drafts[slot] = drafts
            table.num_scheduled[slot] += len(drafts)
            num_left -= len(drafts)
        return budget - num_left

    def _make_step(self, changes: StepChanges) -> StepPlan | None:
        """Put the scheduled tokens into a plan, and count them as computed and sampled from now on.

        A run that reaches the last token, known or in flight, samples a new one.
        """
        table, batch = self.table, self.state.batch
        counts = table.num_scheduled[batch.slots]
        if not counts.all():
            batch, counts = batch.select(counts > 0), counts[counts > 0]
        if not len(batch):
            return None
        slots = batch.slots
        starts = table.num_computed[slots]
        ends = starts + counts
        drafts = [changes.drafts.get(slot, []) for slot in slots.tolist()] if changes.drafts else []
        num_samples = (ends == table.num_planned[slots]).astype(np.int64)
        if drafts:
            num_drafts = np.array([len(each) for each in drafts], dtype=np.int64)
            num_samples = np.where(ends - num_drafts == table.num_planned[slots], 1 + num_drafts, 0)
        is_gated = (num_samples > 0) & (table.has_grammar[slots] > 0)
        table.num_computed[slots] = ends
        table.num_planned[slots] += num_samples
        table.num_in_flight[slots] += num_samples
        plan = StepPlan(
            step_id=self.num_steps,
            removed_rows=self.state.collect_removed_rows(),
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
        )
        gated = np.flatnonzero(is_gated).tolist()
        num_preemptions = table.num_preemptions[slots]
        self._steps.append(
            StepRecord(plan.step_id, batch, counts, num_preemptions, num_samples, gated, changes.drafts)
        )
        self.state.num_steps += 1
        return plan

    def update(self, done: StepDone) -> NewTokens:
        """Take a step's answer: append tokens, end requests."""
        step = next(step for step in self._steps if step.step_id == done.step_id)
        news = self._reader.read(step, done)
        if done.is_last:
            if step.gated:  # rows that ended before their mask came
                step.take_back_samples(self.table, step.gated)
            self._steps.remove(step)
        return news


def _get_key(request: Request) -> tuple[float, float, int]:
    return request.queue_key
