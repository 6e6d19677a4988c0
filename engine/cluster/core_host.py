"""CoreHost: loads a model once, and runs one EngineCore after another for a front in this process or behind a Link."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from engine.actors.watchdog import watch_steps
from engine.cache_folder import CacheFolder
from engine.config import EngineConfig
from engine.engine_core import EngineCore
from engine.errors import ConfigError
from engine.host_memory import return_freed_memory
from engine.input.tokenizer import Tokenizer
from engine.messages import CoreInbox
from engine.model import read_eos_token_ids
from engine.wire.link_messages import Asleep, CoreFailed, CoreReady, Heartbeat, WakeUp
from engine.worker.executor import Executor, Loaded
from engine.worker.mock_worker import MockWorker
from engine.worker.worker import Worker

logger = logging.getLogger("troupe.engine")

HEARTBEAT_S = 0.5
LoadTokenizer = Callable[[], tuple[Tokenizer | None, tuple[int, ...]]]


class CoreHost:
    """Serves one front after another. A sleeping or crashed core leaves the loaded weights to the next one."""

    def __init__(self, config: EngineConfig, load_tokenizer: LoadTokenizer) -> None:
        self.worker: Executor | None = None
        self.core: EngineCore | None = None  # while it accepts messages
        self._config = config
        self._load_tokenizer = load_tokenizer
        self._loaded: Loaded | None = None
        self._wake = asyncio.Event()

    async def serve(
        self, deliver: Callable[[Any], None], report_hang: Callable[[TimeoutError], None],
        publishes_kv_events: bool = False,
    ) -> None:
        """Run cores until one crashes; `deliver` gets their messages.

        Args:
            report_hang: called when a step hangs; this method raises the error only after that step has ended.

        Raises:
            Exception: the core could not start, or it crashed. `deliver` got CoreFailed at the moment of the crash,
                and all threads have ended.
        """
        beat = asyncio.create_task(self._beat(deliver))
        try:
            while True:
                error = await self._run_core(deliver, report_hang, publishes_kv_events)
                self._wake.clear()
                self._send_heartbeat(deliver)
                deliver(Asleep(None if error is None else describe_error(error)))
                await self._wake.wait()
        finally:
            beat.cancel()

    def handle(self, message: CoreInbox | WakeUp) -> None:
        """Handle a message of the front. A core that ends meanwhile loses it; the front sends requests again."""
        if isinstance(message, WakeUp):
            self._wake.set()
        elif self.core is not None:
            self.core.send(message)

    def close(self, *, frees_memory: bool = True) -> None:
        if self.worker is not None:
            self.worker.close(frees_memory=frees_memory)

    async def _run_core(
        self, deliver: Callable[[Any], None], report_hang: Callable[[TimeoutError], None],
        publishes_kv_events: bool,
    ) -> BaseException | None:
        """Run one core until it falls asleep. Returns the error if it could not wake up."""
        has_failed = False

        def report_crash(error: BaseException) -> None:
            nonlocal has_failed
            self.core = None
            if not has_failed:
                has_failed = True
                if self._loaded is not None:
                    logger.error("the core crashed: %s", describe_error(error), exc_info=error)
                deliver(CoreFailed(describe_error(error), "config" if isinstance(error, ConfigError) else "crash"))

        def note_hang(error: TimeoutError) -> None:
            nonlocal has_failed
            self.core, has_failed = None, True
            report_hang(error)

        try:
            worker = await self._find_worker()
            core = EngineCore(
                *(self._config, worker, self._tokenizer, self._eos_token_ids, deliver, report_crash),
                publishes_kv_events=publishes_kv_events,
            )
            # The watchdog is in an outer group, so it also watches the last step.
            async with asyncio.TaskGroup() as watch, asyncio.TaskGroup() as tasks:
                self._loaded = await core.start(tasks, self._loaded)
                if timeout_s := self._config.step_timeout_s:
                    watchdog = watch_steps(core.scheduler.scheduler, timeout_s, note_hang)
                    core.attach(watch.create_task(watchdog, name="watchdog"))
                self.core = core
                deliver(CoreReady(self._loaded.resolved, list(self._loaded.timeline), worker.describe()))
        except Exception as error:  # the border of the core: the front is informed, and the error is passed on
            cause = first_cause(error)
            # After a crash that was reported the front waits for the next core, also if this one fell asleep meanwhile.
            if self.worker is not None and self.worker.sleep_level and not has_failed:
                return cause
            report_crash(cause)
            raise cause from None
        finally:
            self.core = None
        return None

    async def _find_worker(self) -> Executor:
        if self.worker is None:
            self._tokenizer, self._eos_token_ids = await asyncio.to_thread(self._load_tokenizer)
            is_mock = self._config.mock_step_ms is not None
            self.worker = MockWorker(self._config) if is_mock else Worker(self._config, self._eos_token_ids)
        return self.worker

    async def _beat(self, deliver: Callable[[Any], None]) -> None:
        while True:
            self._send_heartbeat(deliver)
            await asyncio.sleep(HEARTBEAT_S)

    def _send_heartbeat(self, deliver: Callable[[Any], None]) -> None:
        deliver(Heartbeat({} if self.worker is None or self._loaded is None else self.worker.describe()))


def load_tokenizer(config: EngineConfig) -> tuple[Tokenizer | None, tuple[int, ...]]:
    """Return the tokenizer, unless the config skips it, and the ids of the tokens that end a text."""
    if config.skip_tokenizer_init:
        return None, read_eos_token_ids(config.model)
    cache = CacheFolder() if config.weight_cache else None
    tokenizer = Tokenizer(config.tokenizer or config.model, config.model if config.tokenizer else None, cache)
    return_freed_memory()  # reading a large vocabulary leaves 200 MB of holes
    return tokenizer, tokenizer.eos_token_ids


def first_cause(error: BaseException) -> BaseException:
    """Return the first error of nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
