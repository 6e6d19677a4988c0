"""Supervisor: loads the model once, runs one EngineCore after another, and restarts after a crash.

    start ─▶ "starting" ─▶ "ready" ──crash──▶ "restarting" ─▶ "ready" ... ─▶ "dead" after too many
                              ├──close──▶ "closed"
                              └──sleep──▶ "falling_asleep" ─▶ "sleeping" ──wake_up──▶ "waking_up" ─▶ "ready"

All actors of a core run in one TaskGroup, inside the supervisor's single task. The watchdog runs in an outer group,
so it also watches the last step. A crash fails the requests in flight with EngineDead and is logged once; the next
core reuses the loaded weights. A sleep ends the core, so a sleeping engine has no tasks, threads or cache.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from typing import Literal

from engine.actors.lag_gauge import watch_loop_lag
from engine.actors.watchdog import watch_steps
from engine.config import EngineConfig, ResolvedConfig
from engine.core_client import CoreClient
from engine.engine_core import EngineCore
from engine.errors import EngineDead, EngineSleeping, InvalidRequest
from engine.input.input_processor import InputProcessor
from engine.input.tokenizer import Tokenizer
from engine.messages import Sleep
from engine.metrics import Metrics, ReplicaStats
from engine.model import ModelConfig, read_eos_token_ids
from engine.worker.executor import Executor, Loaded
from engine.worker.mock_worker import MockWorker
from engine.worker.worker import Worker

logger = logging.getLogger("troupe.engine")

EngineState = Literal[
    "new", "starting", "ready", "restarting", "falling_asleep", "sleeping", "waking_up", "dead", "closed"
]
ASLEEP: tuple[EngineState, ...] = ("falling_asleep", "sleeping", "waking_up")
MAX_SLEEP_LEVEL = 2
RESTART_WINDOW_S = 600.0
DRAIN_POLL_S = 0.02  # interval at which a sleep checks whether the requests have ended
HANG_TIMEOUT_S = 2.0  # longest wait of `close` for a hung step
UNWATCHED_TIMEOUT_S = 30.0  # longest wait of `close` without a watchdog


class Supervisor:
    """`client` is set while `state` is "ready"; `worker` and `tokenizer` are set from the first start on."""

    def __init__(self, config: EngineConfig, metrics: Metrics) -> None:
        self.state: EngineState = "new"
        self.error: str | None = None  # cause of the last crash
        self.client: CoreClient | None = None
        self.tokenizer: Tokenizer | None = None
        self.worker: Executor
        self.input_processor: InputProcessor
        self._is_worker_made = False
        self._loaded: Loaded | None = None  # result of the first core's load
        self.timeline: list[tuple[str, float]] = []  # start-up phases, seconds
        self._config = config
        self._metrics = metrics
        self._task: asyncio.Task[None] | None = None
        self._hang = asyncio.Event()  # set while a step hangs
        self._crash: BaseException | None = None  # error of an actor, while the others end
        self._wake = asyncio.Event()
        self._transition: asyncio.Future[None] | None = None  # resolved when a sleep or wake-up is complete
        self._sleep_cancelled = asyncio.Event()  # set if `wake_up` cancels the draining sleep

    async def start(self) -> None:
        """Load the model and start the first core.

        Raises:
            ConfigError: see `Engine.start`.
            EngineDead: the engine was closed meanwhile.
        """
        if self._task is not None:
            raise RuntimeError("the engine was already started; create a new one")
        self.state = "starting"
        self._is_up = asyncio.Event()
        self._task = asyncio.create_task(self._supervise(), name="troupe supervisor")
        up = asyncio.ensure_future(self._is_up.wait())
        try:
            await asyncio.wait([up, self._task], return_when=asyncio.FIRST_COMPLETED)
            if self._task.done():
                if self.state == "closed":
                    raise EngineDead("the engine was closed while it started")
                self.state = "dead"
                self._task.result()
        except asyncio.CancelledError:
            await self.close()
            raise
        finally:
            up.cancel()

    async def close(self) -> None:
        """Stop every task and thread, except the daemon thread of a hung step. Safe to call twice."""
        self.state = "closed"
        if self._task is not None and not self._task.done():
            await self._end_task(self._task)
        has_ended = self._task is None or self._task.done()
        if self.client is not None:
            # The task that ends the streams is still waiting for its step.
            self.client.fail_all(EngineDead("the engine was closed"))
        if self._is_worker_made:
            self.worker.close(frees_memory=has_ended)
        self._end_transition(EngineDead("the engine was closed"))

    async def _end_task(self, task: asyncio.Task[None]) -> None:
        """Cancel the task and wait for it, but not longer than a step may take: a hung thread may never end."""
        is_unwatched = self.client is not None and not self._config.step_timeout_s
        task.cancel()
        hang = asyncio.ensure_future(self._hang.wait())
        try:
            await asyncio.wait(
                [hang, task],
                timeout=UNWATCHED_TIMEOUT_S if is_unwatched else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if self._hang.is_set():
                await asyncio.wait([task], timeout=HANG_TIMEOUT_S)
        finally:
            hang.cancel()

    async def sleep(self, level: int, drain: bool) -> bool:
        """Reject new requests, drain or abort the running ones, then free the memory; see `Engine.sleep`.

        Returns False if `wake_up` was called meanwhile.
        """
        if isinstance(level, bool) or level not in range(1, MAX_SLEEP_LEVEL + 1):
            raise InvalidRequest(f"level={level!r} must be an integer from 1 to {MAX_SLEEP_LEVEL}", "level")
        if self.state == "sleeping":
            if level == self.worker.sleep_level:
                return True
            raise InvalidRequest(
                f"level={level}: the engine sleeps at level {self.worker.sleep_level}; wake it up first",
                "level",
            )
        client = self.require_client()
        self.state = "falling_asleep"
        self._sleep_cancelled = cancelled = asyncio.Event()
        try:
            if not await self._drain(client, drain, cancelled):
                return False
        except asyncio.CancelledError:
            self._cancel_sleep(cancelled)
            raise
        transition = self._begin_transition()
        client.send(Sleep(level))
        await transition
        return True

    async def wake_up(self) -> None:
        """Allocate the memory again and start the next core. A sleep that still drains is cancelled."""
        if self._transition is None:
            self._cancel_sleep(self._sleep_cancelled)
        if self.state == "ready":
            return
        if self.state != "sleeping":
            self.require_client()
        self.state, self.error = "waking_up", None
        transition = self._begin_transition()
        self._wake.set()
        await transition

    @property
    def sleep_level(self) -> int:
        """0 while the engine is awake."""
        return self.worker.sleep_level if self._is_worker_made else 0

    @property
    def resolved(self) -> ResolvedConfig:
        """Available once the engine has started."""
        assert self._loaded is not None, "the engine has not started"
        return self._loaded.resolved

    @property
    def model_config(self) -> ModelConfig:
        """Available once the engine has started."""
        assert self._loaded is not None, "the engine has not started"
        return self._loaded.model_config

    def describe_runtime(self) -> dict[str, str | int]:
        return self.worker.describe()

    def describe_replicas(self) -> list[ReplicaStats]:
        """The only core is not a replica."""
        return []

    async def drain(self, index: int) -> None:
        """Refuse: the engine has no replicas."""
        raise InvalidRequest(f"replica={index}: this engine has one core in the server's process", "replica")

    undrain = restart = drain

    def require_client(self) -> CoreClient:
        """Return the client of the running core.

        Raises:
            EngineSleeping, EngineDead: no core accepts requests; the message gives the state and the cause.
        """
        if self.client is not None and self.state == "ready":
            return self.client
        if self.state in ASLEEP:
            raise EngineSleeping(f"the engine is {self.state.replace('_', ' ')} and accepts no requests")
        why = f" ({self.error})" if self.error else ""
        raise EngineDead(f"the engine is {self.state}{why}")

    async def _supervise(self) -> None:
        await self._load_tokenizer()
        crashes: deque[float] = deque()
        while True:
            try:
                await self._run_core()
            except ExceptionGroup as group:
                cause = _first_cause(group)
                if self.state == "closed":
                    return  # the group raised the watchdog's error instead of the cancellation
                if not self._is_up.is_set():
                    raise cause from None
                self._note_crash(cause, crashes)
                if self.state == "dead":
                    return
            if self.state in ASLEEP:
                await self._wait_asleep()

    def _note_crash(self, cause: BaseException, crashes: deque[float]) -> None:
        """Log a crash, and decide between a restart and the state "dead"."""
        self.error = f"{type(cause).__name__}: {cause}"
        if self.state == "waking_up":
            logger.error("the engine failed to wake up: %s", self.error, exc_info=cause)
            return
        crashes.append(time.monotonic())
        logger.error("the engine crashed: %s", self.error, exc_info=cause)
        while crashes[0] < crashes[-1] - RESTART_WINDOW_S:
            crashes.popleft()
        if len(crashes) > self._config.max_restarts:
            self.state = "dead"
            logger.error("the engine crashed %d times and is not restarted", len(crashes))
        else:
            self._metrics.num_restarts += 1
        self._end_transition(EngineDead(f"the engine crashed: {cause}"))

    async def _drain(self, client: CoreClient, waits: bool, cancelled: asyncio.Event) -> bool:
        """Wait for, or abort, the running requests. Returns False if this sleep was cancelled."""
        if not waits:
            client.abort(list(client.streams))
        # Polled, because requests end in many places and sleeps are rare.
        while not client.is_idle and not cancelled.is_set() and self.state == "falling_asleep":  # noqa: ASYNC110
            await asyncio.sleep(DRAIN_POLL_S)
        if cancelled.is_set():
            return False
        if self.client is client and self.state == "falling_asleep":
            return True
        if self.state == "closed":
            raise EngineDead("the engine was closed before it could sleep")
        raise EngineDead(f"the engine crashed before it could sleep: {self.error}")

    def _cancel_sleep(self, cancelled: asyncio.Event) -> None:
        if self.state == "falling_asleep" and cancelled is self._sleep_cancelled:
            self.state = "ready"
            cancelled.set()

    async def _wait_asleep(self) -> None:
        """Wait for `wake_up`, after a core fell asleep or failed to wake up."""
        if self.state == "waking_up":
            self._end_transition(
                EngineDead(f"the engine failed to wake up and is still asleep: {self.error}")
            )
        else:
            self._end_transition()
        self.state = "sleeping"
        self._wake.clear()
        await self._wake.wait()

    def _begin_transition(self) -> asyncio.Future[None]:
        assert self._transition is None, "one sleep or wake-up at a time"
        self._transition = asyncio.get_running_loop().create_future()
        return self._transition

    def _end_transition(self, error: EngineDead | None = None) -> None:
        transition, self._transition = self._transition, None
        if transition is None or transition.done():
            return
        if error is None:
            transition.set_result(None)
        else:
            transition.set_exception(error)

    async def _run_core(self) -> None:
        client = CoreClient(lambda message: core.send(message), self.tokenizer, self._metrics)
        core = EngineCore(
            self._config, self.worker, self.tokenizer, self.eos_token_ids, client.deliver, self._note_failure
        )
        self._latest, self._core = client, core
        try:
            async with asyncio.TaskGroup() as watch, asyncio.TaskGroup() as tasks:
                loaded = await core.start(tasks, self._loaded)
                for run in (client.detokenizer.run(), watch_loop_lag(self._metrics.loop_lag)):
                    core.attach(tasks.create_task(run))
                if timeout_s := self._config.step_timeout_s:
                    watchdog = watch_steps(lambda: client.stats, timeout_s, self._note_hang)
                    core.attach(watch.create_task(watchdog, name="watchdog"))
                self._note_up(client, loaded)
        except ExceptionGroup as group:
            self._hang.clear()
            if self.state not in ("closed", "waking_up"):
                self.state = "restarting"
            client.fail_all(EngineDead(f"the engine crashed: {_first_cause(group)}"))
            raise
        finally:
            if self.client is not None:
                self._metrics.note_core_end(client.stats)
            self.client = self._crash = None
            client.fail_all(EngineDead("the engine was closed"))

    def _note_up(self, client: CoreClient, loaded: Loaded) -> None:
        if self._loaded is None:
            self.timeline += loaded.timeline
            for notice in loaded.resolved.notices:
                logger.warning("%s", notice)
            self.input_processor = InputProcessor(
                self.tokenizer,
                loaded.resolved.max_model_len,
                loaded.model_config.vocab_size,
                self.eos_token_ids,
            )
        self._loaded = loaded
        self.client, self.state = client, "ready"
        self._is_up.set()
        self._end_transition()

    def _note_hang(self, error: TimeoutError) -> None:
        """Fail all requests and accept none until the step returns and the next core runs."""
        self._hang.set()
        if self._crash is not None:  # otherwise logged only after the step returns
            logger.error("the engine had crashed before: %s", self._crash, exc_info=self._crash)
        if self.state != "closed":
            self.state, self.error = "restarting", f"{type(error).__name__}: {error}"
        self._latest.fail_all(EngineDead(f"the engine hangs: {error}"))

    def _note_failure(self, error: BaseException) -> None:
        """After an actor crashed, fail all requests and accept none until the next core runs."""
        self._crash = error
        if self.state not in ("closed", "waking_up"):
            self.state, self.error = "restarting", f"{type(error).__name__}: {error}"
        self._latest.fail_all(EngineDead(f"the engine crashed: {error}"))

    async def _load_tokenizer(self) -> None:
        start = time.monotonic()
        config = self._config
        if not config.skip_tokenizer_init:
            self.tokenizer = await asyncio.to_thread(
                Tokenizer, config.tokenizer or config.model, config.model if config.tokenizer else None
            )
            self.eos_token_ids: tuple[int, ...] = self.tokenizer.eos_token_ids
        else:
            self.eos_token_ids = await asyncio.to_thread(read_eos_token_ids, config.model)
        is_mock = config.mock_step_ms is not None
        self.worker = MockWorker(config) if is_mock else Worker(config, self.eos_token_ids)
        self._is_worker_made = True
        self.timeline.append(("tokenizer", time.monotonic() - start))


def _first_cause(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
