"""DraftSteps: drafting for the scheduler: it waits for drafts, adds them to a step, counts the accepted ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import compress, islice

import numpy as np

from engine.core.actor_messages import DraftTarget, StateSave, StepDone
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.request import Request
from engine.core.scheduler_state import SchedulerState
from engine.core.step import Batch, StepChanges, StepRecord
from engine.spec.draft_planner import DraftPlanner
from engine.spec.draft_record import Draft

MAX_LOOKS = 16  # requests without drafts that one step looks at again; up to 20 us each


class DraftSteps:
    """Asks the planner for drafts, gives them blocks and state slots, and reports their results. One owner.

    Attributes:
        is_active: whether any request drafts in the step being planned; without one, drafting takes almost no time.
    """

    def __init__(
        self, planner: DraftPlanner, state: SchedulerState, kv_cache: KVCacheManager, max_model_len: int
    ) -> None:
        self.planner = planner
        self.is_active = False
        self._state = state
        self._table = state.table
        self._kv_cache = kv_cache
        self._max_model_len = max_model_len

    def must_wait(self, num_open_steps: int) -> bool:
        """Look for drafts before a step is planned. Returns whether the step has to wait for answers.

        It does if so many requests wait for their drafts that a step without them would split the batch.
        """
        self.is_active = False
        if not self.planner.num_requests:
            return False
        batch, table = self._state.batch, self._table
        is_due = table.wake_at[batch.slots] <= table.num_planned[batch.slots]
        if is_due.any():
            self.planner.wake(islice(compress(batch.requests, is_due.tolist()), MAX_LOOKS))
        self.is_active = bool(table.waits.any())
        if not self.is_active:
            return False
        has_news_coming = num_open_steps > 0 or bool((table.waits[batch.slots] == 2).any())
        return has_news_coming and 2 * int(self.find_waiting(batch.slots).sum()) >= len(batch.slots) > 0

    def find_waiting(self, slots: np.ndarray) -> np.ndarray:
        """Return which requests draft and wait for their last token or for the grammar thread."""
        waits = self._table.waits[slots]
        return (waits == 2) | ((waits == 1) & (self._table.num_in_flight[slots] > 0))

    def add(self, changes: StepChanges, budget: int) -> int:
        """Schedule draft tokens after the last tokens of requests, as far as blocks are free. Returns their number."""
        table, batch = self._table, self._state.batch
        slots = batch.slots
        counts = table.num_scheduled[slots]
        is_last = (counts > 0) & (table.num_computed[slots] + counts == table.num_planned[slots])
        is_ready = is_last & (counts == 1) & (table.waits[slots] == 1) & (table.num_in_flight[slots] == 0)
        if not is_ready.any():
            return 0
        ready = list(compress(batch.requests, is_ready.tolist()))
        found = self.planner.plan(ready, int(counts.sum()), int(is_last.sum()), budget)
        for request in ready:
            draft = found.get(request.slot)
            if draft is None or not self._reserve(
                request, request.num_tokens + len(draft.token_ids), changes
            ):
                continue
            states = self._kv_cache.draft_states
            draft = draft if states is None else states.take(draft)
            if draft is not None:
                changes.drafts[request.slot] = draft
                table.num_scheduled[request.slot] += len(draft.token_ids)
        return sum(len(draft.token_ids) for draft in changes.drafts.values())

    def count_wanted(self, batch: Batch, ends: np.ndarray, changes: StepChanges) -> np.ndarray | None:
        """Return how many drafts the device should propose after each row; their keys and values get blocks."""
        wanted = self.planner.count_wanted(batch.requests, batch.slots) if self.is_active else None
        if wanted is not None:
            for at in np.flatnonzero(wanted).tolist():
                last = min(int(ends[at] + wanted[at]) + 1, self._max_model_len)
                self._reserve(batch.requests[at], last, changes)
        return wanted

    def list_saves(self, batch: Batch, starts: np.ndarray, drafts: Mapping[int, Draft]) -> list[StateSave]:
        """Return the states of state layers that the worker keeps after each draft."""
        states = self._kv_cache.draft_states
        if not drafts or states is None:
            return []
        rows = zip(batch.requests, starts.tolist(), strict=True)
        return [
            save
            for request, start in rows
            if request.slot in drafts
            for save in states.list_saves(request.row, start, drafts[request.slot])
        ]

    def settle(self, step: StepRecord, done: StepDone) -> None:
        """Count the accepted drafts, up to the end of the request, and the time of the step. Called before `take`."""
        if done.time_s and not step.is_answered and self.planner.num_requests:
            self.planner.note_step(step, done.time_s, done.idle_s)
        if not step.drafts:
            return
        ends = np.cumsum(done.counts).tolist()
        for index, count, end in zip(done.indices.tolist(), done.counts.tolist(), ends, strict=True):
            request = step.batch.requests[index]
            draft = step.drafts.get(request.slot)
            if draft is not None and not request.is_finished:
                token_ids = done.token_ids[end - count : end].tolist()
                kept = next(
                    (at + 1 for at, token_id in enumerate(token_ids) if token_id in request.stop_ids), count
                )
                self.planner.settle(request, draft, min(kept, count - 1))
                if self._kv_cache.draft_states is not None:
                    self._kv_cache.draft_states.settle(request, draft, count - 1)

    def take(self, step: StepRecord, done: StepDone) -> None:
        """Take the device's drafts, and ask for forced tokens after those of this message."""
        if done.draft_time_s:
            num_positions = max(map(len, done.drafts.values()), default=1)
            self.planner.costs.note_draft(num_positions, done.draft_time_s)
        if not self.planner.num_requests or not self._table.waits.any():
            return
        slots = step.batch.slots[done.indices]
        for index in done.indices[self._table.waits[slots] > 0].tolist():
            request = step.batch.requests[index]
            if request.is_finished:
                continue
            self.planner.offer_device(request, done.drafts.get(index, ()))
            if request.has_grammar:
                self.planner.ask(request)

    def take_answers(self, answers: Iterable[DraftTarget]) -> None:
        """Take the grammar thread's answers to the planner's questions."""
        for answer in answers:
            request = self._state.requests.get(answer.handle)
            if request is not None:
                self.planner.take_answer(request, answer.source, answer.token_ids)

    def end(self, step: StepRecord) -> None:
        """Free the state slots of a step's drafts after its last result."""
        if self._kv_cache.draft_states is not None:
            for draft in step.drafts.values():
                self._kv_cache.draft_states.free(draft)

    def _reserve(self, request: Request, num_tokens: int, changes: StepChanges) -> bool:
        """Allocate blocks for `num_tokens` tokens if enough are free; drafts preempt no request."""
        fresh = self._kv_cache.grow(request, num_tokens)
        if fresh:
            changes.new_blocks.append((request.row, fresh))
            self._table.num_kv_slots[request.slot] = self._kv_cache.count_slots(request)
        return fresh is not None
