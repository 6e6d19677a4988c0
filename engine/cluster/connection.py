"""Connectors: obtain a core in this process or in one of its own; `remote.py` adds those of other machines."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from engine.cluster.core_host import CoreHost, LoadTokenizer, describe_error
from engine.config import EngineConfig
from engine.errors import ConfigError, EngineDead
from engine.wire.frames import Link
from engine.wire.link_messages import Configure, CoreFailed, CoreReady, WakeUp

ROOT = Path(__file__).resolve().parents[2]
# Signals by which an operator or the kernel ends a process; a request does not cause them.
OUTSIDE_SIGNALS = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP)
WORK_SILENCE_S = 60.0  # a core that loads or computes may be silent for longer: native code holds the interpreter
TICKS_PER_TIMEOUT = 8
MESSAGES_PER_TURN = 16  # of a core that are handled before other tasks of the event loop run
HANG_TIMEOUT_S = 2.0  # longest wait for a hung step when the engine is closed
UNWATCHED_TIMEOUT_S = 30.0  # longest wait for a step without a watchdog when the engine is closed


class End(NamedTuple):
    """How a core ended. `crash` is None if it was killed, stopped or cut off, which no request causes."""

    cause: str
    crash: Exception | None = None


class Connection(Protocol):
    """One core, from its start to its end."""

    def send(self, message: Any) -> None:
        """Send a message. It is lost without an error if the core has ended."""

    async def run(self, handle: Callable[[Any], None]) -> End:
        """Pass the core's messages to `handle` until it has ended. Ends the core if cancelled."""

    def abort(self) -> None:
        """End the core; `run` returns."""


class Connector(Protocol):
    async def connect(self) -> Connection:
        """Return a connection to a core that loads its model now."""

    def close(self) -> None:
        """Free what the cores share. Called once, when none is running any more."""


class LocalConnector:
    """Runs cores on the event loop of this process."""

    def __init__(self, config: EngineConfig, load_tokenizer: LoadTokenizer) -> None:
        self.host = CoreHost(config, load_tokenizer)
        self._has_timeout = bool(config.step_timeout_s)
        self._connection: LocalConnection | None = None

    async def connect(self) -> LocalConnection:
        self._connection = LocalConnection(self.host, self._has_timeout)
        return self._connection

    def close(self) -> None:
        self.host.close(frees_memory=self._connection is None or not self._connection.is_running)


class LocalConnection:
    """Passes messages without encoding them."""

    def __init__(self, host: CoreHost, has_timeout: bool) -> None:
        self.send = host.handle
        self._host = host
        self._has_timeout = has_timeout
        self._hang = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        return self._serving is not None and not self._serving.done()

    async def run(self, handle: Callable[[Any], None]) -> End:
        def report_hang(error: TimeoutError) -> None:
            self._hang.set()
            handle(CoreFailed(describe_error(error), "hang"))

        serving = self._serving = asyncio.create_task(self._host.serve(handle, report_hang))
        try:
            await asyncio.wait([serving])
        except asyncio.CancelledError:
            await self._end(serving)
            raise
        if serving.cancelled():
            return End("it was restarted")
        error = serving.exception()
        assert isinstance(error, Exception), "a core serves until it crashes"
        return End(describe_error(error), error)

    def abort(self) -> None:
        if self._serving is not None:
            self._serving.cancel()

    async def _end(self, serving: asyncio.Task[None]) -> None:
        """Wait for the last step, but not longer than it may take: a hung thread may never end."""
        is_unwatched = self._host.core is not None and not self._has_timeout
        serving.cancel()
        serving.add_done_callback(lambda task: task.cancelled() or task.exception())  # mark it as retrieved
        hang = asyncio.ensure_future(self._hang.wait())
        timeout = UNWATCHED_TIMEOUT_S if is_unwatched else None
        await asyncio.wait([hang, serving], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if self._hang.is_set():
            await asyncio.wait([serving], timeout=HANG_TIMEOUT_S)
        hang.cancel()


class LinkConnection:
    """A core behind a Link. Cuts the connection if the core is silent for too long.

    Args:
        timeout_s: see `heartbeat_timeout_s` of EngineConfig.
        process: None if another machine runs the core.
    """

    def __init__(
        self, link: Link, timeout_s: float, process: asyncio.subprocess.Process | None = None
    ) -> None:
        self.process = process
        self._link = link
        self._timeout_s = timeout_s
        self._is_loading = True
        self._was_heard = True  # since the last tick of `_watch_pulse`
        self._silence: str | None = None  # set if the core was silent for too long
        self._failure: CoreFailed | None = None

    def send(self, message: Any) -> None:
        self._is_loading |= isinstance(message, WakeUp)
        self._link.send(message)

    async def run(self, handle: Callable[[Any], None]) -> End:
        pulse = asyncio.create_task(self._watch_pulse(handle))
        code: int | None = None
        try:
            for number in count(1):
                if number % MESSAGES_PER_TURN == 0:
                    await asyncio.sleep(0)
                message = await self._link.receive()
                self._was_heard = True
                if isinstance(message, CoreReady):
                    self._is_loading = False
                elif isinstance(message, CoreFailed):
                    self._failure = message
                handle(message)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            reason = f"the connection was lost ({error})"
        finally:
            pulse.cancel()
            code = await asyncio.shield(self._end_process())
        if self._failure is not None:
            kind = ConfigError if self._failure.kind == "config" else EngineDead
            return End(self._failure.message, kind(self._failure.message.removeprefix("ConfigError: ")))
        if code not in (None, 0, *OUTSIDE_SIGNALS):
            return End(f"exit code {code}", EngineDead(f"exit code {code}"))
        return End(self._silence or reason)

    def abort(self) -> None:
        self._link.abort()

    async def _watch_pulse(self, handle: Callable[[Any], None]) -> None:
        """Count the silence in ticks of this task: a pause of the machine or of the front counts as one tick."""
        tick_s = self._timeout_s / TICKS_PER_TIMEOUT
        silent_s, used_ticks = 0.0, 0
        while True:
            await asyncio.sleep(tick_s)
            silent_s = 0.0 if self._was_heard else silent_s + tick_s
            self._was_heard = False
            previous, is_waiting = used_ticks, False
            if self.process is not None:
                used_ticks, is_waiting = read_process(self.process.pid)
            is_working = self._is_loading or is_waiting or used_ticks > previous
            if silent_s >= (max(WORK_SILENCE_S, self._timeout_s) if is_working else self._timeout_s):
                self._silence = f"it sent nothing for {silent_s:.1f} s"
                handle(CoreFailed(self._silence, "silence"))  # its requests need not wait for the end of the process
                self._link.abort()
                return

    async def _end_process(self) -> int | None:
        """Close the connection and end the process. Returns its exit code."""
        self._link.abort()
        if self.process is None:
            return None
        if self.process.returncode is None:
            # A core that reported its crash exits by itself; one that was stopped or lost its connection may not.
            try:
                await asyncio.wait_for(self.process.wait(), 0.0 if self._silence else 0.1)
            except TimeoutError:
                with suppress(ProcessLookupError):  # it ended at the last moment
                    self.process.kill()
        return await self.process.wait()


class ProcessConnector:
    """Starts a core process on this machine.

    Args:
        cuda_devices: those that the process sees, one for each rank, with commas; None: all.
    """

    def __init__(
        self, config: EngineConfig, publishes_kv_events: bool, cuda_devices: str | None = None
    ) -> None:
        self._config = replace(
            config, core="local", data_parallel_size=1, data_parallel_size_local=None,
            data_parallel_rank=None, journal=None,
        )
        self._publishes_kv_events = publishes_kv_events
        self._cuda_devices = cuda_devices

    async def connect(self) -> LinkConnection:
        ours, theirs = socket.socketpair()
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        if self._cuda_devices is not None:
            environment["CUDA_VISIBLE_DEVICES"] = self._cuda_devices
        command = [sys.executable, "-m", "engine.cluster.core_process", str(theirs.fileno())]
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment
            )
        finally:
            theirs.close()
        link = Link(*await asyncio.open_connection(sock=ours))
        link.send(Configure(self._config, self._publishes_kv_events))
        return LinkConnection(link, self._config.heartbeat_timeout_s, process)

    def close(self) -> None:
        """Do nothing: each process has ended."""


def read_process(pid: int) -> tuple[int, bool]:
    """Return the processor time of a process in clock ticks, and whether it waits for a processor or for the disk.

    Returns (0, False) if the system does not say so: only Linux does.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0, False
    state, *numbers = stat.rpartition(")")[2].split()
    return int(numbers[10]) + int(numbers[11]), state in "RD"
