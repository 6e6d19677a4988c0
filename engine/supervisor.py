"""Supervisor: the engine's life. It loads once, runs one EngineCore after another, and restarts after a crash.

    start ─▶ "starting" ─▶ "ready" ──crash──▶ "restarting" ─▶ "ready" ... ─▶ "dead" after too many
                              ├──close──▶ "closed"
                              └──sleep──▶ "falling_asleep" ─▶ "sleeping" ──wake_up──▶ "waking_up" ─▶ "ready"

All actors of a core live in one TaskGroup, inside the supervisor's one task; its watchdog lives in a group around
it and so sees the last step back, too. A crash fails the requests in flight with EngineDead and is logged once; the
next core takes over the loaded weights. A sleep ends the core, so a sleeping engine has no tasks, threads or
cache; whoever wakes it up starts the next one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from typing import Literal

from engine.actors.lag_gauge import watch_loop_lag
from engine.actors.watchdog import watch_steps
from engine.config import EngineConfig
from engine.core_client import CoreClient
from engine.engine_core import EngineCore
from engine.errors import EngineDead, EngineSleeping, InvalidRequest
from engine.input.input_processor import InputProcessor
from engine.input.tokenizer import Tokenizer
from engine.messages import Sleep
from engine.metrics import Metrics
from engine.model import read_eos_token_ids
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
DRAIN_LOOK_S = 0.02  # how often a sleep that waits for requests looks whether they have ended
HANG_PATIENCE_S = 2.0  # how long a close waits for a step that hangs
UNWATCHED_PATIENCE_S = 30.0  # how long it waits where no watchdog says which step hangs


class Supervisor:
    """`client` is there while `state` is "ready"; `worker` and `tokenizer` once it has been."""

    def __init__(self, config: EngineConfig, metrics: Metrics) -> None:
        self.state: EngineState = "new"
        self.error: str | None = None  # cause of the last crash
        self.client: CoreClient | None = None
        self.tokenizer: Tokenizer | None = None
        self.worker: Executor
        self.input_processor: InputProcessor
        self._is_worker_made = False
        self._loaded: Loaded | None = None  # what the first core has loaded
        self.timeline: list[tuple[str, float]] = []  # start-up phases, seconds
        self._config = config
        self._metrics = metrics
        self._task: asyncio.Task[None] | None = None
        self._hang = asyncio.Event()  # set from when a step hangs until it is back
        self._crash: BaseException | None = None  # of an actor, while the others end
        self._alarm = asyncio.Event()
        self._turn: asyncio.Future[None] | None = None  # of a caller that waits for a sleep or a wake-up
        self._calling_off = asyncio.Event()  # of the latest sleep that waits for requests

    async def start(self) -> None:
        """Load and bring the first core up; whatever prevents it is raised here, a close as EngineDead."""
        if self._task is not None:
            raise RuntimeError("this engine was started already; make a new one")
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
        """Stop every task and thread, but for a step that hangs: its thread is a daemon. Safe to call twice."""
        self.state = "closed"
        if self._task is not None and not self._task.done():
            await self._end_task(self._task)
        has_ended = self._task is None or self._task.done()
        if self.client is not None:
            # the task that would end them waits for its step
            self.client.fail_all(EngineDead("the engine was closed"))
        if self._is_worker_made:
            self.worker.close(gives_back=has_ended)
        self._end_turn(EngineDead("the engine was closed"))

    async def _end_task(self, task: asyncio.Task[None]) -> None:
        """Cancel it and wait, but no longer than a step may take: the thread of one that hangs may never end."""
        is_unwatched = self.client is not None and not self._config.step_timeout_s
        task.cancel()
        hang = asyncio.ensure_future(self._hang.wait())
        try:
            await asyncio.wait(
                [hang, task],
                timeout=UNWATCHED_PATIENCE_S if is_unwatched else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if self._hang.is_set():
                await asyncio.wait([task], timeout=HANG_PATIENCE_S)
        finally:
            hang.cancel()

    async def sleep(self, level: int, is_patient: bool) -> bool:
        """Take no more requests, let those of now end (or end them), then give the memory back.

        Returns False when somebody woke the engine up meanwhile.
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
        self._calling_off = calling_off = asyncio.Event()
        try:
            if not await self._drain(client, is_patient, calling_off):
                return False
        except asyncio.CancelledError:
            self._call_off(calling_off)
            raise
        turn = self._begin_turn()
        client.send(Sleep(level))
        await turn
        return True

    async def wake_up(self) -> None:
        """Take the memory back and bring the next core up; a sleep that still waits is called off."""
        if self._turn is None:
            self._call_off(self._calling_off)
        if self.state == "ready":
            return
        if self.state != "sleeping":
            self.require_client()
        self.state, self.error = "waking_up", None
        turn = self._begin_turn()
        self._alarm.set()
        await turn

    @property
    def sleep_level(self) -> int:
        """0 while the engine is awake."""
        return self.worker.sleep_level if self._is_worker_made else 0

    @property
    def loaded(self) -> Loaded:
        """What became of the config; there once the engine has started."""
        assert self._loaded is not None, "the engine has not started"
        return self._loaded

    def require_client(self) -> CoreClient:
        """The client of the core that takes requests.

        Raises:
            EngineSleeping, EngineDead: there is none; the message says why.
        """
        if self.client is not None and self.state == "ready":
            return self.client
        if self.state in ASLEEP:
            raise EngineSleeping(f"the engine is {self.state.replace('_', ' ')}: it takes no requests")
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
                    return  # it hung, and the group told of that instead of the close
                if not self._is_up.is_set():
                    raise cause from None
                self._note_crash(cause, crashes)
                if self.state == "dead":
                    return
            if self.state in ASLEEP:
                await self._rest()

    def _note_crash(self, cause: BaseException, crashes: deque[float]) -> None:
        """Log it, and decide whether there will be another core."""
        self.error = f"{type(cause).__name__}: {cause}"
        if self.state == "waking_up":
            logger.error("the engine could not wake up: %s", self.error, exc_info=cause)
            return
        crashes.append(time.monotonic())
        logger.error("the engine crashed: %s", self.error, exc_info=cause)
        while crashes[0] < crashes[-1] - RESTART_WINDOW_S:
            crashes.popleft()
        if len(crashes) > self._config.max_restarts:
            self.state = "dead"
            logger.error("the engine crashed %d times; it stays down", len(crashes))
        else:
            self._metrics.num_restarts += 1
        self._end_turn(EngineDead(f"the engine crashed: {cause}"))

    async def _drain(self, client: CoreClient, is_patient: bool, calling_off: asyncio.Event) -> bool:
        """Wait for the requests to end; False when this sleep was called off, whatever came after it."""
        if not is_patient:
            client.abort(list(client.streams))
        # There is no event for it: requests end in many places, and a sleep is rare.
        while not client.is_idle and not calling_off.is_set() and self.state == "falling_asleep":  # noqa: ASYNC110
            await asyncio.sleep(DRAIN_LOOK_S)
        if calling_off.is_set():
            return False
        if self.client is client and self.state == "falling_asleep":
            return True
        if self.state == "closed":
            raise EngineDead("the engine was closed before it could sleep")
        raise EngineDead(f"the engine crashed before it could sleep: {self.error}")

    def _call_off(self, calling_off: asyncio.Event) -> None:
        if self.state == "falling_asleep" and calling_off is self._calling_off:
            self.state = "ready"
            calling_off.set()

    async def _rest(self) -> None:
        """Between the core that fell asleep and the next one; also after a failed attempt to wake up."""
        if self.state == "waking_up":
            self._end_turn(EngineDead(f"the engine could not wake up and still sleeps: {self.error}"))
        else:
            self._end_turn()
        self.state = "sleeping"
        self._alarm.clear()
        await self._alarm.wait()

    def _begin_turn(self) -> asyncio.Future[None]:
        assert self._turn is None, "one sleep or wake-up at a time"
        self._turn = asyncio.get_running_loop().create_future()
        return self._turn

    def _end_turn(self, error: EngineDead | None = None) -> None:
        turn, self._turn = self._turn, None
        if turn is None or turn.done():
            return
        if error is None:
            turn.set_result(None)
        else:
            turn.set_exception(error)

    async def _run_core(self) -> None:
        # The two know each other by messages alone.
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
        self._end_turn()

    def _note_hang(self, error: TimeoutError) -> None:
        """No request may come until the step is back and the next core is up: a thread cannot be stopped."""
        self._hang.set()
        if self._crash is not None:  # else logged only when the step is back
            logger.error("the engine had crashed before: %s", self._crash, exc_info=self._crash)
        if self.state != "closed":
            self.state, self.error = "restarting", f"{type(error).__name__}: {error}"
        self._latest.fail_all(EngineDead(f"the engine hangs: {error}"))

    def _note_failure(self, error: BaseException) -> None:
        """An actor has crashed: no request may come until the next core is up."""
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
