"""measure_steps: runs a core with batches of many sizes, and fits a StepTable to the times of its steps."""

from __future__ import annotations

import asyncio
import time
from statistics import median
from typing import Any

from engine.cluster.core_host import first_cause
from engine.config import EngineConfig
from engine.core.actor_messages import StepDone, StepPlan
from engine.device.device_link import PendingStep
from engine.engine_core import EngineCore
from engine.messages import AddRequest, CoreOutput, NewCompletion, NewTokens, Sleep
from engine.resolved_config import ResolvedConfig
from engine.sampling_params import SamplingParams
from engine.simulation.step_table import StepSize, StepTable
from engine.worker.worker import Worker

NUM_OUTPUT_TOKENS = 12  # of each request: enough for steps in which all requests of a wave decode
NUM_ROUNDS = 3
SHORT, MIDDLE = 16, 200  # tokens of a prompt
LONG_TOKENS = 4096  # in all prompts of a wave of long ones
NUM_SINGLES = 8  # requests from which the time outside of steps is measured
POLL_S = 0.1
NATIVE_OPS_S = 5.0  # the model moves to the native ops so soon after they are built
FIRST_ID = 3  # of a prompt's token ids, past most special ones


class RecordingWorker(Worker):
    """Notes how long each step takes, with the time since the last one unless `has_idled` is set."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, ())
        self.sizes: list[StepSize] = []
        self.seconds: list[float] = []
        self.has_idled = True
        self._last_end = 0.0

    def execute(self, plan: StepPlan) -> StepDone | PendingStep | None:
        start = time.perf_counter()
        answer = super().execute(plan)
        if isinstance(answer, PendingStep):
            pending = answer

            def finish(arrays: list[Any]) -> StepDone | None:
                done = pending.finish(arrays)
                self._note(plan, start)
                return done

            return PendingStep(pending.fetch, finish)
        self._note(plan, start)
        return answer

    def _note(self, plan: StepPlan, start: float) -> None:
        end = time.perf_counter()
        begin = start if self.has_idled else self._last_end
        self.has_idled = False
        self.sizes.append(StepSize.of(plan))
        self.seconds.append(end - begin)
        self._last_end = end


class _Waves:
    """Sends a wave of requests to a core, and waits until all have ended."""

    def __init__(self) -> None:
        self._num_sent = self._num_open = 0
        self._is_over = asyncio.Event()

    def deliver(self, message: CoreOutput) -> None:
        if isinstance(message, NewTokens):
            self._num_open -= sum(detail.finish_reason is not None for detail in message.details)
            if not self._num_open:
                self._is_over.set()

    async def send(
        self, core: EngineCore, vocab_size: int, num_requests: int, prompt_len: int, num_tokens: int
    ) -> None:
        self._is_over.clear()
        self._num_open = num_requests
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.0)
        for _ in range(num_requests):
            number = self._num_sent = self._num_sent + 1
            # No two prompts share a prefix.
            first = FIRST_ID + number % (vocab_size - FIRST_ID)
            prompt = [
                first,
                *(FIRST_ID + (number + at) % (vocab_size - FIRST_ID) for at in range(1, prompt_len)),
            ]
            core.send(AddRequest(str(number), prompt, params, [NewCompletion(number, number)]))
        await self._is_over.wait()


async def measure_steps(config: EngineConfig) -> tuple[StepTable, ResolvedConfig]:
    """Load the model, measure for some seconds, and return the table and the resolved config.

    Raises:
        ConfigError: the config cannot be used, as in `Engine.start`.
    """
    worker, waves = RecordingWorker(config), _Waves()
    errors: list[BaseException] = []
    core = EngineCore(config, worker, None, (), waves.deliver, errors.append)
    try:
        async with asyncio.TaskGroup() as tasks:
            resolved = (await core.start(tasks, None)).resolved
            table = await _measure(core, worker, waves, resolved)
            core.send(Sleep(2))
    except BaseExceptionGroup as group:
        raise first_cause(group) from None
    finally:
        worker.close()
    return table, resolved


async def _measure(
    core: EngineCore, worker: RecordingWorker, waves: _Waves, resolved: ResolvedConfig
) -> StepTable:
    vocab_size, limits = worker.model_config.vocab_size, resolved.scheduler
    cache = resolved.cache
    capacity = (cache.num_blocks - 1) // len(cache.groups) * cache.block_size
    longest = min(limits.max_model_len, capacity) - NUM_OUTPUT_TOKENS - 1
    await _wait_for_native_ops(worker)
    counts = [1]
    while counts[-1] < limits.max_num_seqs:
        counts.append(min(2 * counts[-1], limits.max_num_seqs))
    waves_sent = [(count, SHORT) for count in counts]
    waves_sent += [(1, longest), (min(counts[-1], max(1, LONG_TOKENS // longest)), longest)]
    waves_sent += [(max(1, min(counts[-1], LONG_TOKENS // MIDDLE)), min(MIDDLE, longest))]
    await waves.send(core, vocab_size, counts[-1], SHORT, NUM_OUTPUT_TOKENS)  # warms up
    worker.sizes.clear()
    worker.seconds.clear()
    for _ in range(NUM_ROUNDS):
        for count, length in waves_sent:
            num = max(1, min(count, capacity // (length + NUM_OUTPUT_TOKENS + resolved.cache.block_size)))
            worker.has_idled = True
            await waves.send(core, vocab_size, num, length, NUM_OUTPUT_TOKENS)
    sizes, seconds = list(worker.sizes), list(worker.seconds)
    front_times = []
    for _ in range(NUM_SINGLES):
        worker.has_idled = True
        start = time.perf_counter()
        await waves.send(core, vocab_size, 1, SHORT, 1)
        front_times.append(time.perf_counter() - start - worker.seconds[-1])
    return StepTable.fit(sizes, seconds, max(0.0, median(front_times)))


async def _wait_for_native_ops(worker: RecordingWorker) -> None:
    """Wait until the model runs on the ops that it will keep. Polled: builds and repacking have no events."""
    while worker.describe().get("native_ops") == "being built":  # noqa: ASYNC110
        await asyncio.sleep(POLL_S)
    deadline = time.monotonic() + NATIVE_OPS_S
    while worker.describe()["ops"] != "native" and "native_ops" in worker.describe():
        if time.monotonic() > deadline:
            return
        await asyncio.sleep(POLL_S)
