"""CoreHost: runs an EngineCore in this process for a front that is connected by a Link."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import assert_never

from engine.actors.watchdog import watch_steps
from engine.cluster.frames import Link
from engine.cluster.messages import Asleep, CoreFailed, CoreReady, Heartbeat, WakeUp
from engine.config import EngineConfig
from engine.engine_core import EngineCore
from engine.errors import ConfigError
from engine.input.tokenizer import Tokenizer
from engine.messages import (
    AbortRequest,
    AddRequest,
    CoreOutput,
    CoreStats,
    ResetPrefixCache,
    Sleep,
    TakeSnapshot,
)
from engine.model import read_eos_token_ids
from engine.worker.executor import Executor, Loaded
from engine.worker.mock_worker import MockWorker
from engine.worker.worker import Worker

logger = logging.getLogger("troupe.engine")

HEARTBEAT_S = 0.5


class FrontGone(Exception):
    """The connection to the front was lost."""


class CoreHost:
    """Loads the model once, and serves one connection after another."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._stats = CoreStats()
        self._wake = asyncio.Event()
        self._core: EngineCore | None = None
        self._loaded: Loaded | None = None
        self._worker: Executor | None = None

    async def serve(self, link: Link, publishes_kv_events: bool) -> None:
        """Serve a front until the connection is lost.

        Raises:
            Exception: the core could not start, or it crashed; the front has been informed.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._beat(link))
                tasks.create_task(self._receive(link))
                while True:
                    await self._run_core(link, publishes_kv_events)
                    self._wake.clear()
                    link.send(Asleep())
                    await self._wake.wait()
        except BaseExceptionGroup as group:
            cause = first_cause(group)
            if isinstance(cause, FrontGone):
                link.abort()
                return
            link.send(CoreFailed(f"{type(cause).__name__}: {cause}", isinstance(cause, ConfigError)))
            link.close()
            raise cause from None

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()

    async def _run_core(self, link: Link, publishes_kv_events: bool) -> None:
        """Run one core until it falls asleep."""
        if self._worker is None:
            await asyncio.to_thread(self._make_worker)
        assert self._worker is not None
        deliver = link.send

        def note(message: CoreOutput) -> None:
            if type(message) is CoreStats:
                self._stats = message
            deliver(message)

        core = EngineCore(
            *(self._config, self._worker, self._tokenizer, self._eos_token_ids),
            deliver=note,
            report_crash=lambda error: logger.error("the core crashed: %r", error, exc_info=error),
            publishes_kv_events=publishes_kv_events,
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                self._loaded = await core.start(tasks, self._loaded)
                if timeout_s := self._config.step_timeout_s:
                    watchdog = watch_steps(
                        lambda: self._stats, timeout_s, lambda error: exit_hung(link, error)
                    )
                    core.attach(tasks.create_task(watchdog))
                self._core = core
                runtime = self._worker.describe()
                link.send(CoreReady(self._loaded.resolved, list(self._loaded.timeline), runtime))
        finally:
            self._core = None

    def _make_worker(self) -> None:
        config = self._config
        self._tokenizer: Tokenizer | None = None
        if config.skip_tokenizer_init:
            self._eos_token_ids = read_eos_token_ids(config.model)
        else:
            self._tokenizer = Tokenizer(
                config.tokenizer or config.model, config.model if config.tokenizer else None
            )
            self._eos_token_ids = self._tokenizer.eos_token_ids
        is_mock = config.mock_step_ms is not None
        self._worker = MockWorker(config) if is_mock else Worker(config, self._eos_token_ids)

    async def _receive(self, link: Link) -> None:
        while True:
            try:
                message: (
                    AddRequest | AbortRequest | TakeSnapshot | ResetPrefixCache | Sleep | WakeUp
                ) = await link.receive()
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                raise FrontGone(str(error)) from error
            match message:
                case WakeUp():
                    self._wake.set()
                case AddRequest() | AbortRequest() | TakeSnapshot() | ResetPrefixCache() | Sleep():
                    if self._core is not None:
                        self._core.send(message)
                case _:
                    assert_never(message)

    async def _beat(self, link: Link) -> None:
        while True:
            runtime = self._worker.describe() if self._core is not None and self._worker is not None else {}
            link.send(Heartbeat(self._stats.num_steps, runtime))
            await asyncio.sleep(HEARTBEAT_S)


def first_cause(error: BaseException) -> BaseException:
    """Return the first error of nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def exit_hung(link: Link, error: TimeoutError) -> None:
    """End the process: a thread that hangs in a step cannot be stopped."""
    link.send(CoreFailed(str(error)))
    link.close()
    os._exit(1)
