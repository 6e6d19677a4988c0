"""ExecutorActor: the one thread that owns the device. Steps in, answers out."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from queue import Empty

from engine.actors.actor import ThreadActor
from engine.messages import ExecutorInbox, RunStep, SampleGate, StepDone, StepPlan
from engine.worker.mock_worker import MockWorker
from engine.worker.worker import Worker

GATE_PATIENCE_S = 0.002  # how long plain rows wait for the masks of the step before, at most


class ExecutorActor(ThreadActor[ExecutorInbox]):
    """Drives the Worker. Loads it on its first start, empties it on a restart."""

    def __init__(
        self, worker: Worker | MockWorker, deliver: Callable[[StepDone], None], is_restart: bool
    ) -> None:
        super().__init__("troupe-executor")
        self._worker = worker
        self._deliver = deliver
        self._is_restart = is_restart
        self._held: deque[ExecutorInbox | None] = deque()  # taken from the queue while waiting for a gate

    def work(self) -> None:
        if self._is_restart:
            self._worker.reset()
        else:
            self._worker.load()
        self.mark_ready()
        while (message := self._held.popleft() if self._held else self._queue.get()) is not None:
            match message:
                case RunStep(plan=plan):
                    if self._worker.has_parked:
                        self._await_gate(plan)
                    self._answer(self._worker.execute(plan))
                case SampleGate():
                    self._answer(self._worker.sample_gated(message))

    def _await_gate(self, plan: StepPlan) -> None:
        """Give late masks a moment, so that their rows join this step; without plain rows wait as long as it takes."""
        deadline = time.monotonic() + GATE_PATIENCE_S if self._worker.can_run(plan) else None
        while self._worker.has_parked:
            try:
                timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
                message = self._queue.get(timeout=timeout)
            except Empty:
                return
            if isinstance(message, SampleGate):
                self._answer(self._worker.sample_gated(message))
            else:
                self._held.append(message)
                if message is None:
                    return

    def _answer(self, done: StepDone | None) -> None:
        if done is not None:
            self.post(self._deliver, done)
