"""Supervisor: the engine's life. It loads once, runs one Company after another, and restarts after a crash.

    start ─▶ "starting" ─▶ "ready" ──crash──▶ "restarting" ─▶ "ready" ... ─▶ "dead" after too many
                              └──close──▶ "closed"

All tasks of a company live in one TaskGroup, inside the supervisor's one task. A crash fails the requests in
flight with EngineDead and is logged once; the next company takes over the loaded weights.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from typing import Literal

from engine.company import Company
from engine.config import EngineConfig
from engine.errors import EngineDead
from engine.metrics import Metrics
from engine.model import ModelConfig
from engine.tokenizer import Tokenizer
from engine.worker.mock_worker import MockWorker
from engine.worker.worker import Worker

logger = logging.getLogger("troupe.engine")

EngineState = Literal["new", "starting", "ready", "restarting", "dead", "closed"]
RESTART_WINDOW_S = 600.0
HANG_PATIENCE_S = 2.0  # how long a close waits for a step that hangs


class Supervisor:
    """`company` is there while `state` is "ready"; `worker` and `tokenizer` once it has been."""

    def __init__(self, config: EngineConfig, metrics: Metrics) -> None:
        self.state: EngineState = "new"
        self.error: str | None = None  # cause of the last crash
        self.company: Company | None = None
        self.tokenizer: Tokenizer | None = None
        self.worker: Worker | MockWorker
        self._is_worker_made = False
        self.timeline: list[tuple[str, float]] = []  # start-up phases, seconds
        self._config = config
        self._metrics = metrics
        self._task: asyncio.Task[None] | None = None
        self._is_hanging = False

    async def start(self) -> None:
        """Load and bring the first company up; whatever prevents it is raised here."""
        if self._task is not None:
            raise RuntimeError("this engine was started already; make a new one")
        self.state = "starting"
        self._is_up = asyncio.Event()
        self._task = asyncio.create_task(self._supervise(), name="troupe supervisor")
        up = asyncio.ensure_future(self._is_up.wait())
        try:
            await asyncio.wait([up, self._task], return_when=asyncio.FIRST_COMPLETED)
            if self._task.done():
                self.state = "dead"
                self._task.result()
        except asyncio.CancelledError:
            await self.close()
            raise
        finally:
            up.cancel()

    async def close(self) -> None:
        """Stop every task and thread. Safe to call twice."""
        self.state = "closed"
        if self._task is not None and not self._task.done():
            self._task.cancel()
            # the thread of a step that hangs may never end; it is a daemon
            await asyncio.wait([self._task], timeout=HANG_PATIENCE_S if self._is_hanging else None)
        if self._is_worker_made:
            self.worker.close()

    def require_company(self) -> Company:
        """The company that takes requests.

        Raises:
            EngineDead: there is none; the message says why.
        """
        if self.company is not None and self.state == "ready":
            return self.company
        why = f" ({self.error})" if self.error else ""
        raise EngineDead(f"the engine is {self.state}{why}")

    async def _supervise(self) -> None:
        await self._load_tokenizer()
        crashes: deque[float] = deque()
        while True:
            try:
                await self._run_company(is_restart=bool(crashes))
            except ExceptionGroup as group:
                cause = _first_cause(group)
                if self.state == "closed":
                    return  # it hung, and the group told of that instead of the close
                if not self._is_up.is_set():
                    raise cause from None
                self.error = f"{type(cause).__name__}: {cause}"
                crashes.append(time.monotonic())
                logger.error("the engine crashed: %s", self.error, exc_info=cause)
            while crashes[0] < crashes[-1] - RESTART_WINDOW_S:
                crashes.popleft()
            if len(crashes) > self._config.max_restarts:
                self.state = "dead"
                logger.error("the engine crashed %d times; it stays down", len(crashes))
                return
            self._metrics.num_restarts += 1

    async def _run_company(self, is_restart: bool) -> None:
        company = Company(
            self._config, self.worker, self.tokenizer, self._eos_token_ids, self._metrics, self._note_hang
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                await company.start(tasks, is_restart)
                if not is_restart:
                    self.timeline += self.worker.timeline
                    for notice in self.worker.resolved.notices:
                        logger.warning("%s", notice)
                self.company, self.state = company, "ready"
                self._is_up.set()
        except ExceptionGroup as group:
            self._is_hanging = False
            if self.state != "closed":
                self.state = "restarting"
            company.fail_all(EngineDead(f"the engine crashed: {_first_cause(group)}"))
            raise
        finally:
            if self.company is not None:
                company.settle()
            self.company = None
            company.fail_all(EngineDead("the engine was closed"))

    def _note_hang(self, error: TimeoutError) -> None:
        """No request may come until the step is back and the next company is up: a thread cannot be stopped."""
        self.state, self._is_hanging = "restarting", True
        self.error = f"{type(error).__name__}: {error}"

    async def _load_tokenizer(self) -> None:
        start = time.monotonic()
        config = self._config
        if not config.skip_tokenizer_init:
            self.tokenizer = await asyncio.to_thread(Tokenizer, config.tokenizer or config.model)
            self._eos_token_ids: tuple[int, ...] = self.tokenizer.eos_token_ids
        else:
            model_config = await asyncio.to_thread(ModelConfig.from_pretrained, config.model)
            self._eos_token_ids = model_config.eos_token_ids
        is_mock = config.mock_step_ms is not None
        self.worker = MockWorker(config) if is_mock else Worker(config, self._eos_token_ids)
        self._is_worker_made = True
        self.timeline.append(("tokenizer", time.monotonic() - start))


def _first_cause(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
