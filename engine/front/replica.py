"""Replica: one core as the front sees it, wherever it runs. When the core ends, it starts the next one."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

from engine.cluster.connection import Connection, Connector, End
from engine.messages import CoreStats
from engine.wire.link_messages import Asleep, CoreFailed, CoreReady, Heartbeat, WakeUp

logger = logging.getLogger("troupe.engine")

RESTART_WINDOW_S = 600.0
MAX_DELAY_S = 30.0

ReplicaState = Literal["starting", "ready", "draining", "asleep", "dead"]


class Replica:
    """Runs until cancelled. After more than `max_restarts` crashes in ten minutes it is dead until `restart`.

    Args:
        receive: gets the core's messages about requests and calls.
        note_state: gets Asleep, and CoreFailed of a step that hangs.
        note_ready, note_down: called when the core begins and ceases to accept requests. `note_down` gets the cause,
            and whether the core crashed, as opposed to being killed or cut off.
    """

    def __init__(
        self, index: int, connector: Connector, max_restarts: int, receive: Callable[[Replica, Any], None],
        note_state: Callable[[Replica, Asleep | CoreFailed], None], note_ready: Callable[[Replica], None],
        note_down: Callable[[Replica, str, bool], None],
    ) -> None:
        self.index = index
        self.state: ReplicaState = "starting"
        self.stats = CoreStats()
        # From the core's first answer; kept after its end.
        self.ready: CoreReady | None = None
        self.fingerprint, self.max_model_len, self.max_num_seqs = "", 0, 0
        self.is_prefill_only = False  # it computes prompts for other replicas
        self.runtime: dict[str, str | int] = {}
        self.error: str | None = None
        self.num_restarts = 0
        self.connector = connector
        self.connection: Connection | None = None
        self._max_restarts = max_restarts
        self._receive = receive
        self._note_state = note_state
        self._note_ready = note_ready
        self._note_down = note_down
        self._was_ready = False  # the core has become ready
        self._has_failed = False  # the core has crashed and is ending
        self._revived = asyncio.Event()

    @property
    def is_up(self) -> bool:
        return self.state in ("ready", "draining")

    def send(self, message: Any) -> None:
        if self.connection is not None and not self._has_failed:
            self.connection.send(message)

    def wake_up(self) -> None:
        self.state = "starting"
        self.send(WakeUp())

    def restart(self) -> None:
        """End the core, if there is one; `run` starts the next one."""
        self._revived.set()
        if self.connection is not None:
            self.connection.abort()

    async def run(self) -> None:
        """Run one core after another.

        Raises:
            Exception: the first core could not start.
        """
        crashes: deque[float] = deque()
        num_failed_starts = 0
        try:
            while True:
                end, was_ready = await self._run_core()
                if end.crash is not None:
                    if self.ready is None:
                        raise end.crash
                    crashes.append(time.monotonic())
                while crashes and crashes[0] < time.monotonic() - RESTART_WINDOW_S:
                    crashes.popleft()
                if len(crashes) > self._max_restarts:
                    self._revived.clear()
                    self._go_down(end.cause, end.crash is not None, "dead")
                    logger.error("replica %d crashed %d times and is not restarted", self.index, len(crashes))
                    await self._revived.wait()
                    crashes.clear()
                    self.state, was_ready = "starting", True
                else:
                    self._go_down(end.cause, end.crash is not None)
                num_failed_starts = 0 if was_ready else num_failed_starts + 1
                if num_failed_starts > 1:
                    await asyncio.sleep(min(MAX_DELAY_S, 0.25 * 2**num_failed_starts))
                self.num_restarts += 1
        finally:
            self.connector.close()

    async def _run_core(self) -> tuple[End, bool]:
        """Run one core. Returns how it ended, and whether it had become ready."""
        self.connection = await self.connector.connect()
        self._has_failed = self._was_ready = False
        try:
            return await self.connection.run(self._handle), self._was_ready
        finally:
            self.connection = None

    def _handle(self, message: Any) -> None:
        if self._has_failed:
            if isinstance(message, CoreFailed) and message.kind == "hang":
                self._note_state(self, message)
            return
        match message:
            case Heartbeat(runtime=runtime):
                self.runtime = runtime or self.runtime
            case CoreReady():
                self.ready, self.runtime, self.state = message, message.runtime, "ready"
                resolved, self.error, self._was_ready = message.resolved, None, True
                self.fingerprint, self.max_model_len = resolved.fingerprint, resolved.max_model_len
                self.max_num_seqs = resolved.scheduler.max_num_seqs
                self.is_prefill_only = resolved.kv_role == "kv_producer"
                self._note_ready(self)
            case CoreFailed(message=cause, kind=kind):
                self._go_down(cause, is_crash=kind != "silence")
                if kind == "hang":
                    self._note_state(self, message)
            case Asleep(error=error):
                self.state, self.error = "asleep", error
                self._note_state(self, message)
            case _:
                if isinstance(message, CoreStats):
                    self.stats = message
                self._receive(self, message)

    def _go_down(self, cause: str, is_crash: bool, state: ReplicaState = "starting") -> None:
        """Report once that the core accepts no requests any more, although it may still be ending."""
        was_up, self.state = self.state != "starting", state
        self.error = cause
        self._has_failed = True
        if was_up or state == "dead":
            logger.warning("replica %d: %s", self.index, cause)
            self._note_down(self, cause, is_crash)
