"""Connectors: obtain a Link to a core process, by starting the process or by accepting a core of another machine."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from engine.cluster.frames import Link
from engine.cluster.messages import Configure
from engine.config import EngineConfig

ROOT = Path(__file__).resolve().parents[2]
EXIT_TIMEOUT_S = 5.0
# Signals by which an operator or the kernel ends a process; a request does not cause them.
OUTSIDE_SIGNALS = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Connection:
    """A connected core. `process` is None if another machine runs it."""

    link: Link
    process: asyncio.subprocess.Process | None = None

    async def end(self) -> str | None:
        """Close the connection and end the process.

        Returns how the process crashed; None if it was killed or disconnected, which no request causes.
        """
        self.link.abort()
        if self.process is None:
            return None
        if self.process.returncode is None:
            # A core that reported its crash exits by itself; one that was stopped or lost its connection may not.
            try:
                await asyncio.wait_for(self.process.wait(), 0.1)
            except TimeoutError:
                self.process.kill()
        code = await self.process.wait()
        return None if code in (0, *OUTSIDE_SIGNALS) else f"exit code {code}"


class Connector(Protocol):
    async def connect(self) -> Connection:
        """Return a connection to a core that loads its model now."""


class ProcessConnector:
    """Starts a core process on this machine.

    Args:
        config: of the core; its device is the one that `cuda_device` names.
        cuda_device: the only CUDA device that the process sees; None: all.
    """

    def __init__(
        self, config: EngineConfig, publishes_kv_events: bool, cuda_device: str | None = None
    ) -> None:
        self._config = replace(
            config, core="local", data_parallel_size=1, data_parallel_size_local=None, data_parallel_rank=None
        )
        self._publishes_kv_events = publishes_kv_events
        self._cuda_device = cuda_device

    async def connect(self) -> Connection:
        ours, theirs = socket.socketpair()
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        if self._cuda_device is not None:
            environment["CUDA_VISIBLE_DEVICES"] = self._cuda_device
        command = [sys.executable, "-m", "engine.cluster.core_process", str(theirs.fileno())]
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment
            )
        finally:
            theirs.close()
        link = Link(*await asyncio.open_connection(sock=ours))
        link.send(Configure(self._config, self._publishes_kv_events))
        return Connection(link, process)
