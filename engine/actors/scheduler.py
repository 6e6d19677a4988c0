"""SchedulerActor: carries messages in and out of the Scheduler, and keeps the executor fed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import assert_never

from engine.actors.actor import Actor
from engine.core.scheduler import Scheduler
from engine.messages import (
    AbortRequest,
    AddRequest,
    DropMatchers,
    ExecutorInbox,
    GrammarFailed,
    GrammarInbox,
    NewTokens,
    SchedulerInbox,
    StepDone,
)
from engine.metrics import Metrics


class SchedulerActor(Actor[SchedulerInbox]):
    """The only owner of the Scheduler."""

    def __init__(
        self,
        scheduler: Scheduler,
        metrics: Metrics,
        tell_executor: Callable[[ExecutorInbox], None],
        tell_grammar: Callable[[GrammarInbox], None],
        tell_detokenizer: Callable[[NewTokens], None],
    ) -> None:
        super().__init__()
        self.scheduler = scheduler
        self._metrics = metrics
        self._tell_executor = tell_executor
        self._tell_grammar = tell_grammar
        self._tell_detokenizer = tell_detokenizer
        self._with_grammar: set[int] = set()
        self._idle_since: float | None = None  # the executor ran dry while there was work

    def handle(self, message: SchedulerInbox) -> None:
        match message:
            case StepDone():
                if self.scheduler.num_open_steps <= 1:
                    self._idle_since = time.monotonic()
                self._publish(self.scheduler.update(message))
            case AddRequest():
                if message.params.grammar is not None:
                    self._with_grammar.update(each.handle for each in message.completions)
                self.scheduler.add(message)
            case AbortRequest(handles=handles, finish_reason=reason, error=error):
                self._publish(self.scheduler.abort(handles, reason, error))
            case GrammarFailed():
                self._publish(self.scheduler.end_failed(message))
            case _:
                assert_never(message)

    def finish_batch(self) -> None:
        self._order_masks()
        while (plan := self.scheduler.schedule()) is not None:
            self._tell_executor(plan)
            self._metrics.count_step(plan.num_tokens)
            if self._idle_since is not None:
                self._metrics.step_gap.observe(time.monotonic() - self._idle_since)
                self._idle_since = None
            self._order_masks()
        if not self.scheduler.has_work:
            self._idle_since = None

    def _order_masks(self) -> None:
        order = self.scheduler.order_masks()
        if order is not None:
            self._tell_grammar(order)

    def _publish(self, new_tokens: NewTokens) -> None:
        if new_tokens.handles or new_tokens.details:
            self._tell_detokenizer(new_tokens)
        if self._with_grammar:
            ended = [
                detail.handle
                for detail in new_tokens.details
                if detail.finish_reason is not None and detail.handle in self._with_grammar
            ]
            if ended:
                self._with_grammar.difference_update(ended)
                self._tell_grammar(DropMatchers(ended))
