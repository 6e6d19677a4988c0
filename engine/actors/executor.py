"""ExecutorActor: the one thread that owns the device. Steps in, answers out.

On CUDA a step is answered when its results have come back, and the next one is launched before that.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from queue import Empty

from engine.actors.actor import ThreadActor
from engine.messages import ExecutorInbox, Sleep, StepDone, StepMasks, StepPlan
from engine.worker.device_link import HostFetch, PendingStep
from engine.worker.executor import Executor, Loaded

CHORE_LOOK_S = 0.2  # how often an idle thread looks for chores, which a build in the background may bring
POLL_S = 0.00005  # how often results on their way are looked for, while no message comes


class ExecutorActor(ThreadActor[ExecutorInbox]):
    """Drives an Executor: loads it on the first start, wakes it after a sleep, resets it after a crash.

    Args:
        loaded: what an earlier start has loaded.
    """

    def __init__(
        self, executor: Executor, deliver: Callable[[StepDone], None], loaded: Loaded | None
    ) -> None:
        super().__init__("troupe-executor")
        self.loaded = loaded  # there once it is ready
        self._executor = executor
        self._deliver = deliver
        self._pending: deque[PendingStep] = deque()  # launched, their results on the way from the device
        self._held: deque[ExecutorInbox | None] = deque()  # taken from the queue while waiting for masks

    def work(self) -> None:
        if self.loaded is None:
            self.loaded = self._executor.load()
        elif self._executor.sleep_level:
            self._executor.wake()
        else:
            self._executor.reset()
        self.mark_ready()
        while (message := self._take()) is not None:
            match message:
                case StepPlan() as plan:
                    self._await_masks(plan)
                    self._answer(self._executor.execute(plan))
                case StepMasks():
                    self._answer(self._executor.sample(message))
                case Sleep(level=level):
                    self._executor.sleep(level)
                    return

    def _take(self) -> ExecutorInbox | None:
        """The next message, or None at the end; a quiet moment before it is used for chores."""
        if self._held:
            return self._held.popleft()
        while True:
            while self._queue.empty() and not self._pending and self._executor.do_chore():
                continue
            try:
                return self._receive(time.monotonic() + CHORE_LOOK_S)
            except Empty:
                continue

    def _receive(self, deadline: float | None = None) -> ExecutorInbox | None:
        """Wait for a message, and hand out the answers of launched steps meanwhile.

        Raises:
            Empty: the deadline passed.
        """
        while self._pending:
            if self._pending[0].is_done():
                self.post(self._deliver, self._pending.popleft().wait())
                continue
            try:
                return self._queue.get(timeout=POLL_S)
            except Empty:
                if deadline is not None and time.monotonic() >= deadline:
                    raise
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        return self._queue.get(timeout=timeout)

    def _await_masks(self, plan: StepPlan) -> None:
        """Wait a moment for late masks, so that their rows join this step; if no row can run, wait until a step can."""
        if None in self._held:
            return  # the end of the work came while an earlier step waited: no masks come any more
        start = time.monotonic()
        while timeout_s := self._executor.get_mask_timeout(plan):
            if timeout_s == math.inf and any(self._can_run(message) for message in self._held):
                return
            try:
                message = self._receive(None if timeout_s == math.inf else start + timeout_s)
            except Empty:
                return
            # Masks of this step, or of one behind it, may be there before the step.
            if isinstance(message, StepMasks) and message.step_id < plan.step_id:
                self._answer(self._executor.sample(message))
            else:
                self._held.append(message)
                if message is None:
                    return

    def _can_run(self, message: ExecutorInbox | None) -> bool:
        """Whether this is a step of which some row needs no more masks."""
        return isinstance(message, StepPlan) and self._executor.get_mask_timeout(message) < math.inf

    def _answer(self, answer: StepDone | PendingStep | None) -> None:
        """Send an answer, or remember to: answers leave in the order of their steps."""
        if isinstance(answer, StepDone) and not self._pending:
            self.post(self._deliver, answer)
        elif isinstance(answer, StepDone):
            self._pending.append(PendingStep(HostFetch([]), lambda _: answer))
        elif answer is not None:
            self._pending.append(answer)
