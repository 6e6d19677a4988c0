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
from itertools import chain, compress
from typing import Any

import numpy as np

from engine.config import SchedulerConfig
from engine.core.batch import Batch
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.request import Request
from engine.core.scheduler_state import SchedulerState
from engine.core.step import MAX_SCORED_TOKENS, StepChanges, StepRecord
from engine.messages import (
    BROKEN_LOGITS,
    NO_TOKEN_LEFT,
    AddRequest,
    Detail,
    FillMasks,
    NewTokens,
    StepDone,
    StepPlan,
)
from engine.outputs import FinishReason, TokenLogprobs
from engine.spec.proposer import Proposer

# Known tokens of the requests that one step admits, however many of them are cached: hashing, finding and copying them
# takes half a microsecond each, and nobody is served meanwhile.
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
        self.num_steps = 0
        self._clock = clock
        self._proposer = proposer
        self._max_open_steps = config.max_steps_in_flight if proposer is None else 1
        self._eos_token_ids = frozenset(eos_token_ids)
        self._steps: deque[StepRecord] = deque()
        self._accepted: list[tuple[int, int]] = []

    def __contains__(self, handle: int) -> bool:
        return handle in self.state.requests

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
        return NewTokens(details=[self._finish(request, finish_reason, error=error) for request in found])

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
        # Those that gave way come back when somebody runs in their place; with nobody running no step would ask again.
        if self.state.num_preemptions == num_preemptions or not self.state.running:
            self._admit_waiting(changes, budget)
        return self._make_step(changes)

    def order_masks(self) -> FillMasks | None:
        """The oldest step whose masks can be filled: all grammar tokens before it are known."""
        step = next((step for step in self._steps if step.gated), None)
        if step is None or step.has_masks_ordered:
            return None
        step.has_masks_ordered = True
        accepted, self._accepted = self._accepted, []
        return FillMasks(step.step_id, accepted, step.make_targets())

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
        is_short = (ends > table.num_places[slots]) & (counts > 0)
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
            self.table.num_places[batch.slots[short]] += self.kv_cache.block_size
            return
        for index, request in zip(short.tolist(), requests, strict=True):
            if index < len(self.state.batch):  # else preempted for one before it
                self._make_room(request, int(ends[index]), changes)

    def _make_room(self, request: Request, num_tokens: int, changes: StepChanges) -> None:
        """Blocks for `num_tokens` tokens, preempting from the back, at the worst the request itself."""
        while (fresh := self.kv_cache.grow(request, num_tokens)) is None:
            victim = self.state.running[-1]
            self.state.preempt(victim, self.num_steps - 1)
            if victim is request:
                return
        changes.new_blocks.append((request.row, fresh))
        self.table.num_places[request.slot] = len(request.block_ids) * self.kv_cache.block_size

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
            while (num_cached := self.kv_cache.admit(request) if state.has_place else None) is None:
                if state.rows.num_draining and not state.rows.num_free:
                    return  # the row of an earlier victim is on its way
                will_fit = will_fit or self.kv_cache.would_fit(request, worse)
                if not will_fit:
                    return
                state.preempt(worse.pop(), self.num_steps - 1)
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
                table.num_places[slot] = len(request.block_ids) * self.kv_cache.block_size
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
        num_drafts = np.array([len(each) for each in drafts], dtype=np.int64) if drafts else 0
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
        self.num_steps += 1
        return plan

    def update(self, done: StepDone) -> NewTokens:
        """Take a step's answer: append tokens, end requests."""
        step = next(step for step in self._steps if step.step_id == done.step_id)
        scored: list[Request] = []
        if not step.is_answered:
            step.is_answered = True
            step.take_back_runs(self.table, done.skipped)
            scored = self._take_prompt_logprobs(step, done)
        told = self._take_tokens(step, done)
        # At once, and not with the next token: they are long, and to be read bit by bit.
        told.details.extend(request.make_detail() for request in scored if request.pending_prompt_logprobs)
        if step.gated and len(done.indices):
            came = set(done.indices.tolist())
            step.gated = [index for index in step.gated if index not in came]
        if done.is_last:
            if step.gated:  # rows that ended before their mask came
                step.take_back_samples(self.table, step.gated)
            self._steps.remove(step)
        return told

    def _take_prompt_logprobs(self, step: StepRecord, done: StepDone) -> list[Request]:
        """Note what a step tells of prompts; returns whose."""
        scored = []
        for index, logprobs in done.prompt_logprobs.items():
            request = step.batch.requests[index]
            is_same = request.num_preemptions == step.num_preemptions[index]
            if is_same and not request.is_finished:
                request.take_prompt_logprobs(logprobs)
                scored.append(request)
        return scored

    def _take_tokens(self, step: StepRecord, done: StepDone) -> NewTokens:
        """Append the tokens of an answer, and end requests."""
        details: list[Detail] = []
        table, batch = self.table, step.match(done.indices)
        slots, token_ids, counts = batch.slots, done.token_ids, done.counts
        step.settle_samples(table, done.indices, counts)
        num_tokens = table.num_planned[slots] - table.num_in_flight[slots]
        is_special = (table.is_watched[slots] > 0) | (num_tokens >= table.max_num_tokens[slots])
        is_end = token_ids < 0
        for eos_token_id in self._eos_token_ids:
            is_end |= token_ids == eos_token_id
        has_many = len(token_ids) > len(batch)
        is_special |= np.logical_or.reduceat(is_end, np.cumsum(counts) - counts) if has_many else is_end
        plain, plain_ids, plain_counts = batch, token_ids, counts
        if is_special.any():
            is_plain = ~is_special
            plain, plain_ids = batch.select(is_plain), token_ids[np.repeat(is_plain, counts)]
            plain_counts = counts[is_plain]
            kept = self._take_specials(batch, np.flatnonzero(is_special).tolist(), done, details)
            if (kept < counts).any():
                places = np.arange(len(token_ids)) - np.repeat(np.cumsum(counts) - counts, counts)
                token_ids = token_ids[places < np.repeat(kept, counts)]
                batch, counts = batch.select(kept > 0), kept[kept > 0]
        if has_many:
            ends = np.cumsum(plain_counts).tolist()
            for request, count, end in zip(plain.requests, plain_counts.tolist(), ends, strict=True):
                request.token_ids += plain_ids[end - count : end].tolist()
        else:
            for append, token_id in zip(plain.appends, plain_ids.tolist(), strict=True):
                append(token_id)
        told = NewTokens(batch.handles, counts.tolist() if has_many else [], token_ids.tolist(), details)
        if step.gated:
            has_grammar = np.repeat(table.has_grammar[batch.slots], counts).tolist()
            handles = np.repeat(batch.handles, counts).tolist() if has_many else batch.handles
            self._accepted += compress(zip(handles, told.token_ids, strict=True), has_grammar)
        return told

    def _take_specials(
        self, batch: Batch, places: list[int], done: StepDone, details: list[Detail]
    ) -> np.ndarray:
        """The tokens of requests that have more to tell, or may be over; returns how many of each request count."""
        kept = done.counts.copy()
        ends = np.cumsum(kept).tolist()
        for at in places:
            request = batch.requests[at]
            if request.is_finished:
                kept[at] = 0
                continue
            token_ids = done.token_ids[ends[at] - int(kept[at]) : ends[at]].tolist()
            kept[at], detail = self._take_each(request, token_ids, done.logprobs.get(int(done.indices[at])))
            details.append(detail)
        return kept

    def _take_each(
        self, request: Request, token_ids: list[int], logprobs: list[TokenLogprobs] | None
    ) -> tuple[int, Detail]:
        """Take tokens up to the request's end; returns how many, and what there is to tell beside them."""
        for count, token_id in enumerate(token_ids):
            if token_id == NO_TOKEN_LEFT:
                error = request.describe_dead_end()
                return count, self._finish(request, "dead_end", error=error, logprobs=logprobs)
            if token_id == BROKEN_LOGITS:
                self.kv_cache.forget(request)
                error = "no token could be sampled: the model's logits were not numbers"
                return count, self._finish(request, "error", error=error, logprobs=logprobs)
            request.token_ids.append(token_id)
            told = None if logprobs is None else logprobs[: count + 1]
            if token_id in request.stop_ids:  # the sampler forbids them before min_tokens
                stop_reason = None if token_id in self._eos_token_ids else token_id
                return count + 1, self._finish(request, "stop", logprobs=told, stop_reason=stop_reason)
            if request.num_tokens >= request.max_num_tokens:
                return count + 1, self._finish(request, "length", logprobs=told)
        self.table.is_watched[request.slot] = request.is_watched
        return len(token_ids), request.make_detail(logprobs=logprobs)

    def _finish(self, request: Request, finish_reason: FinishReason, **more: Any) -> Detail:
        """End a request; tokens still in flight are dropped when they come."""
        self.state.finish(request, self.num_steps - 1)
        return request.make_detail(finish_reason=finish_reason, **more)


def _get_key(request: Request) -> tuple[float, float, int]:
    return request.queue_key
