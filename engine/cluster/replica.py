"""Replica: one core in another process, as the front sees it. It connects, watches the core, and connects again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

from engine.cluster.connection import Connection, Connector
from engine.cluster.messages import Asleep, CoreFailed, CoreReady, Heartbeat, WakeUp
from engine.errors import ConfigError
from engine.messages import CoreStats

logger = logging.getLogger("troupe.engine")

SILENCE_S = (
    2.0  # a core that sends nothing for so long is stopped or cut off; it sends a heartbeat every 0.5 s
)
LOAD_SILENCE_S = 60.0  # while it loads the model, native code may hold the interpreter for long
PULSE_CHECK_S = 0.25
RESTART_WINDOW_S = 600.0
QUICK_DEATH_S = 10.0  # a core that ends sooner after its start is restarted with a delay
MAX_DELAY_S = 30.0

ReplicaState = Literal["starting", "ready", "draining", "asleep", "dead"]


class Replica:
    """Runs until cancelled, or until its core has crashed more than `max_restarts` times in ten minutes.

    Args:
        receive: gets the core's messages.
        note_ready, note_down: called when the core begins and ceases to accept requests. `note_down` gets the cause,
            and whether the core crashed, as opposed to being killed or cut off.
    """

    def __init__(
        self,
        index: int,
        connector: Connector,
        max_restarts: int,
        receive: Callable[[Replica, Any], None],
        note_ready: Callable[[Replica], None],
        note_down: Callable[[Replica, str, bool], None],
    ) -> None:
        self.index = index
        self.state: ReplicaState = "starting"
        self.stats = CoreStats()
        self.ready: CoreReady | None = None  # the core's first answer; kept after its end
        self.runtime: dict[str, str | int] = {}
        self.error: str | None = None
        self.num_restarts = 0
        self._connector = connector
        self._max_restarts = max_restarts
        self._receive = receive
        self._note_ready = note_ready
        self._note_down = note_down
        self._connection: Connection | None = None
        self._last_seen = 0.0

    @property
    def fingerprint(self) -> str:
        return "" if self.ready is None else self.ready.resolved.fingerprint

    def send(self, message: Any) -> None:
        if self._connection is not None:
            self._connection.link.send(message)

    def wake_up(self) -> None:
        self.state = "starting"
        self.send(WakeUp())

    def restart(self) -> None:
        """End the core; `run` starts the next one."""
        if self._connection is not None:
            self._connection.link.abort()

    async def run(self) -> None:
        crashes: deque[float] = deque()
        num_quick_deaths = 0
        while True:
            start = time.monotonic()
            cause, is_crash = await self._run_core()
            was_up, self.state = self.state != "starting", "starting"
            self.error = cause
            if is_crash:
                crashes.append(time.monotonic())
            while crashes and crashes[0] < time.monotonic() - RESTART_WINDOW_S:
                crashes.popleft()
            if len(crashes) > self._max_restarts:
                self.state = "dead"
            if was_up or self.state == "dead":
                self._note_down(self, cause, is_crash)
                self.stats = CoreStats()
            if self.state == "dead":
                logger.error("replica %d crashed %d times and is not restarted", self.index, len(crashes))
                return
            num_quick_deaths = num_quick_deaths + 1 if time.monotonic() - start < QUICK_DEATH_S else 0
            if num_quick_deaths > 1:
                await asyncio.sleep(min(MAX_DELAY_S, 0.25 * 2**num_quick_deaths))
            self.num_restarts += 1

    async def _run_core(self) -> tuple[str, bool]:
        """Run one core. Returns why it ended, and whether it crashed."""
        connection = self._connection = await self._connector.connect()
        self.error = None
        pulse = asyncio.create_task(self._watch_pulse(connection))
        try:
            while True:
                self._handle(await connection.link.receive())
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            logger.warning("replica %d: %s", self.index, self.error or f"the connection was lost ({error})")
        finally:
            self._connection = None
            pulse.cancel()
            crash = await asyncio.shield(connection.end())
        return self.error or crash or "the connection was lost", crash is not None

    def _handle(self, message: Any) -> None:
        self._last_seen = time.monotonic()
        match message:
            case Heartbeat(runtime=runtime):
                self.runtime = runtime or self.runtime
            case CoreReady():
                if (
                    self.ready is not None
                    and self.ready.resolved.max_model_len != message.resolved.max_model_len
                ):
                    logger.warning("replica %d: max_model_len has changed", self.index)
                self.ready, self.runtime, self.state = message, message.runtime, "ready"
                self._note_ready(self)
            case CoreFailed(message=cause, is_config_error=is_config_error):
                self.error = cause
                if is_config_error and self.ready is None:
                    raise ConfigError(cause.removeprefix("ConfigError: "))
            case Asleep():
                self.state = "asleep"
                self._receive(self, message)
            case CoreStats():
                self.stats = message
                self._receive(self, message)
            case _:
                self._receive(self, message)

    async def _watch_pulse(self, connection: Connection) -> None:
        """Cut the connection if the core has been silent for too long."""
        self._last_seen = time.monotonic()
        while True:
            before = time.monotonic()
            await asyncio.sleep(PULSE_CHECK_S)
            now = time.monotonic()
            if now - before > 2 * PULSE_CHECK_S:
                self._last_seen = now  # this process did not run, so it could not receive
            if now - self._last_seen > (LOAD_SILENCE_S if self.state == "starting" else SILENCE_S):
                self.error = f"it sent nothing for {now - self._last_seen:.1f} s"
                connection.link.abort()
                return
