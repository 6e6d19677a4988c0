"""SchedulerActor: the loop of the engine. It lets the Scheduler plan steps, and sends them to the executor."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import assert_never

from engine.core.actor_messages import (
    AdapterReady,
    BlocksAnswer,
    DropMatchers,
    ExecutorInbox,
    GrammarInbox,
    GrammarReport,
    SchedulerInbox,
    StepDone,
)
from engine.core.block_hash import is_block_hash
from engine.core.scheduler import Scheduler
from engine.core.snapshot import take_snapshot
from engine.messages import (
    AbortRequest,
    AddRequest,
    CoreOutput,
    CoreStats,
    DropAdapter,
    KVEvents,
    NewTokens,
    Reply,
    ResetPrefixCache,
    TakeSnapshot,
)


class SchedulerActor:
    """Owns the Scheduler. `run_turn` is the loop of the engine; call `tell` on the event loop only."""

    def __init__(
        self, scheduler: Scheduler, tell_executor: Callable[[ExecutorInbox], None],
        tell_grammar: Callable[[GrammarInbox], None], deliver: Callable[[CoreOutput], None],
        count_grammars: Callable[[], tuple[int, int]],
    ) -> None:
        self._inbox: deque[SchedulerInbox] = deque()
        self._wake = asyncio.Event()
        self.scheduler = scheduler
        self._transfers = scheduler.state.transfers
        self._tell_executor = tell_executor
        self._tell_grammar = tell_grammar
        self._deliver = deliver
        self._count_grammars = count_grammars  # (cached, retired)
        self._with_grammar: set[int] = set()
        self._idle_since: float | None = None  # since when the executor has no step
        self._num_step_tokens = 0
        # Both since the last CoreStats.
        self._step_gaps_s: list[float] = []
        self._step_tokens: list[int] = []
        self._mask_times_s: list[float] = []
        self._deliver(self._make_stats())

    def tell(self, message: SchedulerInbox) -> None:
        self._inbox.append(message)
        self._wake.set()

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            self.run_turn()

    def run_turn(self) -> None:
        """Process all messages, then plan the next steps.

        update ─▶ new tokens to the front ─▶ questions to the grammar thread ─▶ schedule ─▶ plan to the executor
        """
        scheduler = self.scheduler
        while self._inbox:
            message = self._inbox.popleft()
            if not isinstance(message, StepDone):
                self._handle(message)
                continue
            if scheduler.num_open_steps <= 1:
                self._idle_since = time.monotonic()
            if message.mask_time_s:
                self._mask_times_s.append(message.mask_time_s)
            self._publish(scheduler.update(message))
        if scheduler.drafts is not None and (questions := scheduler.order_drafts()) is not None:
            self._tell_grammar(questions)
        while (plan := scheduler.schedule()) is not None:
            self._tell_executor(plan)
            self._step_tokens.append(int(plan.num_scheduled_tokens.sum()))
            self._num_step_tokens += self._step_tokens[-1]
            if self._idle_since is not None:
                self._step_gaps_s.append(time.monotonic() - self._idle_since)
                self._idle_since = None
        if not scheduler.state.requests:
            self._idle_since = None
        if changes := scheduler.kv_cache.pool.changes:
            # Routers need the prefixes of the first group only.
            stored = [key for key, is_cached in changes.items() if is_cached and is_block_hash(key)]
            removed = [key for key, is_cached in changes.items() if not is_cached and is_block_hash(key)]
            self._deliver(KVEvents(stored, removed))
            changes.clear()
        self._deliver(self._make_stats())

    def _handle(self, message: SchedulerInbox) -> None:
        match message:
            case AddRequest():
                if message.params.grammar is not None:
                    self._with_grammar.update(each.handle for each in message.completions)
                self.scheduler.add(message)
            case AbortRequest(handles=handles, finish_reason=reason, error=error):
                self._publish(self.scheduler.abort(handles, reason, error))
            case GrammarReport(failed=failed, drafts=drafts):
                if self.scheduler.drafts is not None:
                    self.scheduler.drafts.take_answers(drafts)
                for each in failed:
                    self.scheduler.state.dead_ends[each.cause] += each.handle in self.scheduler
                    self._publish(self.scheduler.abort([each.handle], each.finish_reason, each.error))
            case DropAdapter(digest=digest):
                if self.scheduler.state.adapters is not None:
                    self.scheduler.state.adapters.drop(digest)
            case BlocksAnswer(take=take):
                self.scheduler.state.waiting.restore(take())
            case AdapterReady():
                self._publish(self.scheduler.take_adapter(message))
            case TakeSnapshot(call_id=call_id, with_blocks=with_blocks):
                self._deliver(Reply(call_id, take_snapshot(self.scheduler, with_blocks)))
            case ResetPrefixCache(call_id=call_id):
                self._deliver(Reply(call_id, is_reset=self.scheduler.kv_cache.reset_cache()))
            case StepDone():
                raise AssertionError("`run_turn` processes it")
            case _:
                assert_never(message)

    def _make_stats(self) -> CoreStats:
        scheduler, kv_cache = self.scheduler, self.scheduler.kv_cache
        gaps, self._step_gaps_s = self._step_gaps_s, []
        mask_times, self._mask_times_s = self._mask_times_s, []
        step_tokens, self._step_tokens = self._step_tokens, []
        state, pool = scheduler.state, kv_cache.pool
        num_cached, num_retired = self._count_grammars()
        # Positional: it is made in every step.
        return CoreStats(
            *(len(state.batch.requests), state.num_steps, scheduler.num_open_steps, self._num_step_tokens),
            *(state.num_preemptions, kv_cache.num_queried_tokens, kv_cache.num_hit_tokens),
            *(pool.num_usable, pool.num_free, len(pool.by_hash)),
            step_gaps_s=gaps,
            step_tokens=step_tokens,
            mask_times_s=mask_times,
            drafts={} if scheduler.drafts is None else scheduler.drafts.planner.count(),
            kv_offload_loads=kv_cache.num_loaded_tokens,
            kv_received_tokens=0 if self._transfers is None else self._transfers.num_received_tokens,
            kv_saved_tokens=0 if self._transfers is None else self._transfers.num_saved_tokens,
            prefix_cache_stateless=kv_cache.num_stateless_tokens,
            prefix_cache_windowless=kv_cache.num_windowless_tokens,
            num_grammars_cached=num_cached,
            num_grammars_retired=num_retired,
            dead_ends_no_token=state.dead_ends["no_token"],
            dead_ends_limit=state.dead_ends["limit"],
            dead_ends_slow=state.dead_ends["slow"],
        )

    def _publish(self, new_tokens: NewTokens) -> None:
        if self._transfers is not None:
            new_tokens = self._transfers.hold_ends(new_tokens, self._deliver)
        if new_tokens.handles or new_tokens.details:
            self._deliver(new_tokens)
        if self._with_grammar:
            ended = [
                detail.handle
                for detail in new_tokens.details
                if detail.finish_reason is not None and detail.handle in self._with_grammar
            ]
            if ended:
                self._with_grammar.difference_update(ended)
                self._tell_grammar(DropMatchers(ended))
