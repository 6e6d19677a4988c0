"""Scheduler: one step after another, which requests compute how many tokens.

    waiting ──admit (blocks for the whole prompt)──▶ running ──stop, length, abort, error──▶ finished
       ▲                                               │
       └────────── preempt (blocks taken back) ────────┘

Every request has `num_computed_tokens` chasing its tokens; a step spends one token budget, running requests
first. Steps overlap: the next one is planned while the last one runs, each sampled row counted as one token
in flight. The running list is sorted by the queue key, so the last one is always the victim.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable

from engine.config import SchedulerConfig
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.request_queue import RequestQueue
from engine.core.row_pool import RowPool
from engine.core.step import PlanBuilder, StepRecord
from engine.messages import AddRequest, FillMasks, NewTokens, RequestTokens, StepDone, StepPlan
from engine.outputs import FinishReason, TokenLogprobs
from engine.request import Request, RequestStatus

MAX_IN_FLIGHT = 2  # sampled tokens of one request that may be on their way back


class Scheduler:
    """Plans steps and takes their answers. Synchronous; one owner."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache: KVCacheManager,
        eos_token_ids: Iterable[int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.kv_cache = kv_cache
        self.waiting = RequestQueue(config.policy, config.priority_ageing_s)
        self.running: list[Request] = []  # sorted by queue_key
        self.num_preemptions = 0
        self.num_steps = 0
        self._clock = clock
        self._eos_token_ids = frozenset(eos_token_ids)
        self._requests: dict[str, Request] = {}
        self._steps: deque[StepRecord] = deque()
        self._rows = RowPool(config.max_num_seqs)
        self._accepted: list[tuple[str, int]] = []

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    @property
    def num_open_steps(self) -> int:
        """Steps whose forward has not come back."""
        return sum(not step.is_answered for step in self._steps)

    @property
    def has_work(self) -> bool:
        return bool(self.running) or len(self.waiting) > 0

    def add(self, message: AddRequest) -> None:
        """Queue a request. The front has validated it: it fits the model length and the cache."""
        request = Request(message, self.config.max_model_len, self._eos_token_ids)
        if message.params.prompt_logprobs is not None:
            request.pending_prompt_logprobs = [None]
        self._requests[request.request_id] = request
        self.waiting.push(request)

    def abort(
        self, request_ids: Iterable[str], finish_reason: FinishReason = "abort", error: str | None = None
    ) -> list[RequestTokens]:
        """End requests wherever they are; unknown ids are ignored."""
        ended = []
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._finish(request)
                ended.append(self._make_tokens(request, [], finish_reason=finish_reason, error=error))
        return ended

    def schedule(self) -> StepPlan | None:
        """The next step, or None when there is nothing to do or enough is in flight."""
        if self.num_open_steps >= self.config.max_steps_in_flight:
            return None
        self._rows.drain(self._oldest_step)
        builder = PlanBuilder(self.num_steps)
        num_preemptions = self.num_preemptions
        if self.config.policy == "priority":
            self._displace(builder)
        budget = self._schedule_running(builder, self.config.max_num_batched_tokens)
        if self.num_preemptions == num_preemptions:
            self._admit_waiting(builder, budget)
        if not builder.requests:
            return None
        plan, record = builder.build(self._rows.collect_removed(), self.kv_cache.block_size)
        self._steps.append(record)
        self.num_steps += 1
        return plan

    def order_masks(self) -> FillMasks | None:
        """The oldest step whose masks can be filled: all grammar tokens before it are known."""
        for step in self._steps:
            if step.gated and not step.has_masks_ordered:
                step.has_masks_ordered = True
                accepted, self._accepted = self._accepted, []
                targets = [
                    (index, step.requests[index].request_id)
                    for index in step.gated
                    if not step.requests[index].is_finished
                ]
                return FillMasks(step.step_id, accepted, targets)
            if step.gated:
                return None
        return None

    def _schedule_running(self, builder: PlanBuilder, budget: int) -> int:
        block_size = self.kv_cache.block_size
        running = self.running  # shrinks at its end when somebody is preempted
        for index, request in enumerate(running):
            if budget <= 0:
                break
            num_known = len(request.token_ids) + request.num_in_flight
            count = num_known - request.num_computed_tokens
            if count <= 0 or request.num_in_flight >= MAX_IN_FLIGHT or num_known >= request.max_num_tokens:
                continue
            if count > 1:
                count = min(count, self._limit_chunk(budget, num_behind=len(running) - index - 1))
            end = request.num_computed_tokens + count
            if end > len(request.block_ids) * block_size and not self._make_room(request, end, builder):
                continue
            budget -= count
            builder.add_run(request, count)
            if end <= len(request.token_ids):
                # Later requests of this very step may share these blocks: each layer writes before it reads.
                self.kv_cache.commit(request, end)
        return budget

    def _limit_chunk(self, budget: int, num_behind: int) -> int:
        """Tokens a prefill may take: one is left for each running request behind it, half for those that wait."""
        rest = budget - num_behind
        if self._peek_admissible() is not None:
            rest = min(rest, budget // 2)
        return max(1, rest)

    def _make_room(self, request: Request, num_tokens: int, builder: PlanBuilder) -> bool:
        """Blocks for `num_tokens` tokens, preempting from the back; False when the request itself had to go."""
        while True:
            fresh = self.kv_cache.grow(request, num_tokens)
            if fresh is not None:
                if fresh:
                    builder.new_blocks.append((request.row, fresh))
                return True
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False

    def _admit_waiting(self, builder: PlanBuilder, budget: int) -> None:
        while budget > 0 and (request := self._peek_admissible()) is not None:
            if not self.config.enable_chunked_prefill and self.kv_cache.count_uncached(request) > budget:
                return
            if not self.kv_cache.admit(request):
                return
            self._start(request, builder)
            count = min(request.num_tokens - request.num_computed_tokens, budget)
            budget -= count
            builder.add_run(request, count)
            self.kv_cache.commit(request, request.num_computed_tokens)

    def _peek_admissible(self) -> Request | None:
        if not self._rows.num_free or len(self.running) >= self.config.max_num_seqs:
            return None
        request = self.waiting.peek()
        # A preempted request whose tokens are still on their way back waits for them.
        return None if request is None or request.num_in_flight else request

    def _start(self, request: Request, builder: PlanBuilder) -> None:
        self.waiting.pop()
        request.row = self._rows.take()
        request.status = RequestStatus.RUNNING
        insort(self.running, request, key=lambda other: other.queue_key)
        if request.first_scheduled_time is None:
            request.first_scheduled_time = self._clock()
            request.num_cached_tokens = request.num_computed_tokens
        builder.add_new_row(request)

    def _displace(self, builder: PlanBuilder) -> None:
        """Let better waiting requests take the slots and blocks of worse running ones."""
        while (request := self.waiting.peek()) is not None and self.running and not request.num_in_flight:
            victim = self.running[-1]
            if request.queue_key >= victim.queue_key:
                return
            if (
                self._rows.num_free
                and len(self.running) < self.config.max_num_seqs
                and self.kv_cache.admit(request)
            ):
                self._start(request, builder)
            elif self._rows.num_draining and not self._rows.num_free:
                return  # the row of an earlier victim is on its way
            else:
                self._preempt(victim)
                self._rows.drain(self._oldest_step)

    def _preempt(self, request: Request) -> None:
        """Take all blocks back; the request keeps its tokens and queues under its old key."""
        self.running.remove(request)
        self.kv_cache.free(request)
        self._release_row(request)
        request.status = RequestStatus.WAITING
        request.num_preemptions += 1
        if request.pending_prompt_logprobs is not None:
            request.pending_prompt_logprobs = [None]
        self.num_preemptions += 1
        self.waiting.push(request)

    def update(self, done: StepDone) -> NewTokens:
        """Take a step's answer: append tokens, end requests, offer full blocks to the prefix cache."""
        step = next(step for step in self._steps if step.step_id == done.step_id)
        if not step.is_answered:
            step.is_answered = True
            self._take_back_skipped(step, done.skipped)
            self._take_prompt_logprobs(step, done)
            self._commit_runs(step)
        new_tokens = self._append_tokens(step.requests, done)
        if step.gated and done.indices:
            came = set(done.indices)
            step.gated = [index for index in step.gated if index not in came]
        if done.is_last:
            for index in step.gated:  # rows that ended before their mask came
                step.requests[index].num_in_flight -= 1
            self._steps.remove(step)
        return new_tokens

    def _append_tokens(self, requests: list[Request], done: StepDone) -> NewTokens:
        items: list[RequestTokens] = []
        plain: list[tuple[str, int]] = []
        for index, token_id in zip(done.indices, done.token_ids, strict=True):
            request = requests[index]
            request.num_in_flight -= 1
            if request.status is RequestStatus.FINISHED:
                continue
            token_ids = request.token_ids
            if (
                request.num_prompt_tokens < len(token_ids) < request.max_num_tokens - 1
                and not request.is_watched
                and token_id >= 0
                and token_id not in request.stop_ids
            ):
                token_ids.append(token_id)
                plain.append((request.request_id, token_id))
            else:
                items.append(self._append_token(request, token_id, done.logprobs.get(index)))
        return NewTokens(items, plain)

    def _append_token(self, request: Request, token_id: int, logprobs: TokenLogprobs | None) -> RequestTokens:
        if token_id < 0:
            self._finish(request)
            return self._make_tokens(request, [], finish_reason="error", error=_describe_no_token(request))
        token_ids = request.token_ids
        token_ids.append(token_id)
        if request.has_grammar:
            self._accepted.append((request.request_id, token_id))
        if token_id in request.stop_ids:  # the sampler forbids them before min_tokens
            reason: FinishReason | None = "stop"
        elif len(token_ids) >= request.max_num_tokens:
            reason = "length"
        else:
            reason = None
        stop_reason = token_id if reason == "stop" and token_id not in self._eos_token_ids else None
        if reason is not None:
            self._finish(request)
        listed = None if logprobs is None else [logprobs]
        return self._make_tokens(
            request, [token_id], logprobs=listed, finish_reason=reason, stop_reason=stop_reason
        )

    def _commit_runs(self, step: StepRecord) -> None:
        for index in step.fills_block:
            request = step.requests[index]
            if request.num_preemptions == step.epochs[index] and request.block_ids:
                # A run's input was in flight when planned at most; its answer came before this one.
                self.kv_cache.commit(request, step.starts[index] + step.counts[index])

    def _take_back_skipped(self, step: StepRecord, skipped: Iterable[int]) -> None:
        for index in skipped:
            request = step.requests[index]
            if step.is_sampled[index]:
                request.num_in_flight -= 1
            if request.num_preemptions == step.epochs[index] and not request.is_finished:
                request.num_computed_tokens -= step.counts[index]
            if index in step.fills_block:
                step.fills_block.remove(index)
            if index in step.gated:
                step.gated.remove(index)

    def _take_prompt_logprobs(self, step: StepRecord, done: StepDone) -> None:
        for index, logprobs in done.prompt_logprobs.items():
            request = step.requests[index]
            pending = request.pending_prompt_logprobs
            if pending is not None and request.num_preemptions == step.epochs[index]:
                pending += logprobs

    def _make_tokens(
        self,
        request: Request,
        token_ids: list[int],
        *,
        logprobs: list[TokenLogprobs] | None = None,
        finish_reason: FinishReason | None = None,
        stop_reason: int | None = None,
        error: str | None = None,
    ) -> RequestTokens:
        prompt_logprobs, request.pending_prompt_logprobs = request.pending_prompt_logprobs, None
        return RequestTokens(
            request.request_id,
            token_ids,
            logprobs,
            prompt_logprobs,
            finish_reason,
            stop_reason,
            error,
            request.num_cached_tokens,
            request.first_scheduled_time,
            request.num_preemptions,
        )

    def _finish(self, request: Request) -> None:
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self.kv_cache.free(request)
            self._release_row(request)
        elif request.request_id in self.waiting:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED
        del self._requests[request.request_id]
        self._accepted = [pair for pair in self._accepted if pair[0] != request.request_id]

    def _release_row(self, request: Request) -> None:
        """Give the row back; not before a parked gated sample, which still needs its sampling state, is over."""
        is_parked = request.has_grammar and request.num_in_flight > 0
        self._rows.release(request.row, after_step=self.num_steps - 1 if is_parked else None)
        request.row = -1

    @property
    def _oldest_step(self) -> int:
        return self._steps[0].step_id if self._steps else self.num_steps


def _describe_no_token(request: Request) -> str:
    if request.has_grammar:
        why = "the grammar and the other sampling parameters together allow none"
    else:
        why = "the sampling parameters allow none"
    return f"no token could be sampled: {why}, or the model's logits were not numbers"
