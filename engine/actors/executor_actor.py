"""ExecutorActor: the one thread that owns the device. It receives steps and sends their results.

On CUDA the next step is launched before the results of the last one have been copied back. On the CPU, results wait
until the layers of the next step start: the event loop works on them while the layers run without Python's lock.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from queue import Empty

import numpy as np

from engine.actors.thread_actor import ThreadActor
from engine.core.actor_messages import ExecutorInbox, FillMasks, StepDone, StepMasks, StepPlan
from engine.core.mask_orders import MaskOrders
from engine.device.device_link import PendingStep, wait_for
from engine.messages import Sleep
from engine.worker.executor import Executor, Loaded

CHORE_LOOK_S = 0.2  # how often an idle thread checks for chores; a background build may add some
FOREVER_S = 1e6  # a wait that has no limit of its own
POLL_S = 0.00005  # how often pending results are checked while no message arrives


class ExecutorActor(ThreadActor[ExecutorInbox]):
    """Drives an Executor: loads it on the first start, wakes it after a sleep, resets it after a crash.

    Args:
        loaded: the result of an earlier start; None: load the model.
    """

    # Both are set before the first step.
    deliver: Callable[[StepDone], None]  # gets results, on the loop
    tell_grammar: Callable[[FillMasks], None]  # gets the tokens of rows with a grammar at once

    def __init__(self, executor: Executor, loaded: Loaded | None) -> None:
        super().__init__("troupe-executor")
        self.loaded = loaded  # None until the model is loaded
        self._executor = executor
        self._pending: deque[StepDone | PendingStep] = deque()  # launched steps, from the first that is not copied back
        self._finished: StepDone | None = None  # sent before the layers of the next step
        self._orders = MaskOrders()
        self._held: deque[ExecutorInbox | None] = deque()  # messages received while waiting for masks

    def work(self) -> None:
        """Wait for a step, for its masks, launch it, and send its result before the layers of the next one."""
        executor = self._executor
        executor.before_layers, executor.take_masks = self._send_finished, self._take_masks
        if self.loaded is None:
            self.loaded = executor.load()
        elif executor.sleep_level:
            executor.wake()
        else:
            executor.reset()
        self.mark_ready()
        while (message := self._held.popleft() if self._held else self._receive(None)) is not None:
            match message:
                case StepPlan():
                    self._orders.add(message)
                    if executor.get_mask_timeout(message):
                        self._await_masks(message)
                    self._keep(executor.execute(message))
                    self._order_masks()
                case StepMasks():
                    self._keep(executor.sample(message))
                case Sleep(level=level):
                    self._send_finished()
                    executor.sleep(level)
                    return
            if self._queue.empty() and not self._held:
                self._send_finished()
        self._send_finished()

    def _receive(self, deadline: float | None) -> ExecutorInbox | None:
        """Return the next message, or None at the end. Delivers the results of launched steps meanwhile.

        Args:
            deadline: None: wait as long as it takes, and do chores when there is nothing else to do.

        Raises:
            Empty: the deadline passed.
        """
        if self._queue.empty():
            self._send_finished()
        while True:
            timeout = POLL_S
            if not self._pending:
                while deadline is None and self._queue.empty() and self._executor.do_chore():
                    continue
                timeout = CHORE_LOOK_S if deadline is None else max(0.0, deadline - time.monotonic())
            elif isinstance(first := self._pending[0], StepDone) or first.is_done():
                if (done := wait_for(self._pending.popleft())) is not None:
                    self._send_finished()
                    self._finished = done
                    self._send_finished()
                continue
            try:
                return self._queue.get(timeout=timeout)
            except Empty:
                if deadline is not None and time.monotonic() >= deadline:
                    raise

    def _await_masks(self, plan: StepPlan) -> None:
        """Wait briefly for late masks, so that their rows join this step. If no row can run, wait until one can."""
        if None in self._held:
            return  # shutdown was requested during an earlier wait: no more masks will arrive
        start = time.monotonic()
        while timeout_s := self._executor.get_mask_timeout(plan):
            if timeout_s == math.inf and any(self._can_run(message) for message in self._held):
                return
            try:
                message = self._receive(start + min(timeout_s, FOREVER_S))
            except Empty:
                return
            # Masks of this step or of a later one may arrive before the step itself.
            if isinstance(message, StepMasks) and message.step_id < plan.step_id:
                self._keep(self._executor.sample(message))
            else:
                self._held.append(message)
                if message is None:
                    return

    def _take_masks(self, step_id: int, indices: np.ndarray) -> StepMasks | None:
        """Take the masks of all rows of a step, if they have arrived."""
        with self._queue.mutex:
            for messages in (self._held, self._queue.queue):
                for place, message in enumerate(messages):
                    if isinstance(message, StepMasks) and message.step_id == step_id:
                        if not np.array_equal(message.indices, indices):
                            return None
                        del messages[place]
                        return message
        return None

    def _can_run(self, message: ExecutorInbox | None) -> bool:
        """Return whether this is a step with a row that waits for no mask."""
        return isinstance(message, StepPlan) and self._executor.get_mask_timeout(message) < math.inf

    def _keep(self, answer: StepDone | PendingStep | None) -> None:
        """Keep a result until it is sent, or queue it behind the pending ones: results are sent in the order of steps.

        Masks may arrive while later stages compute their step; its gated rows follow its other rows.
        """
        if isinstance(answer, StepDone) and not self._pending:
            self._send_finished()
            self._finished = answer
        elif isinstance(answer, StepDone):
            self._pending.append(answer)
        elif answer is not None:
            fetches = [None if isinstance(each, StepDone) else each.fetch for each in self._pending]
            same = [at for at, fetch in enumerate(fetches, start=1) if fetch is answer.fetch]
            self._pending.insert(same[-1] if same else len(self._pending), answer)

    def _send_finished(self) -> None:
        done, self._finished = self._finished, None
        if done is not None:
            self._orders.take(done)
        self._order_masks()
        if done is not None:
            self._loop.call_soon_threadsafe(self.deliver, done)

    def _order_masks(self) -> None:
        for order in self._orders.flush():
            self.tell_grammar(order)
