"""Runs the engine's core inside the calls of Hugging Face's ZeroGPU, which lends a GPU for a call of bounded time.

an event of the page, or an API request with X-IP-Token ─▶ spaces.GPU(run_in_call) ─▶ a fork of this process: run_core
"""

from __future__ import annotations

import importlib
import os
import socket
from contextlib import suppress

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from app.config import UsageError
from engine import EngineConfig, EngineDead, LeasedEngine, LeaseRefused, run_core

TOKEN_HEADER = "X-IP-Token"
# What the visitor's quota must have left. A lease without requests ends earlier.
LEASE_S = 30
# The core stops so many seconds before, because the call must end in time.
END_S = 2.0
# Title of the errors of calls that have begun.
WORKER_ERROR = "ZeroGPU worker error"
NO_VISITOR = (
    f"the GPU of this Space is lent to its visitors: use its page, or send the header {TOKEN_HEADER}, whose quota pays"
)


def make_leased_engine(config: EngineConfig, lease_s: int = LEASE_S) -> LeasedEngine:
    """Return the engine of a Space with ZeroGPU. Called by the main thread, before anything uses CUDA.

    Raises:
        UsageError: the package `spaces` is not installed.
    """
    try:
        gpu = importlib.import_module("spaces").GPU
        startup = importlib.import_module("spaces.zero").startup
    except ImportError as error:
        raise UsageError(f"--zero-gpu needs the package spaces, as a Space with ZeroGPU has it: {error}") from error
    gradio = importlib.import_module("gradio")
    run = gpu(run_in_call, duration=lease_s)

    def lend(core_config: EngineConfig, seconds: float) -> None:
        if gradio.context.LocalContext.request.get(None) is None:
            raise LeaseRefused(NO_VISITOR)
        try:
            run(core_config, seconds)
        except gradio.Error as error:
            kind = EngineDead if error.title == WORKER_ERROR else LeaseRefused
            raise kind(str(error.message)) from error

    startup()  # Gradio's `launch`, which we do not call, would do it
    return LeasedEngine(config, lend, max(lease_s - END_S, lease_s / 2))


def run_in_call(config: EngineConfig, seconds: float) -> None:
    """Run a core in the fork that `spaces` makes for calls."""
    drop_connections()
    run_core(config, seconds)


def drop_connections() -> None:
    """Replace this fork's copies of the server's connections, which would stay open for the visitors."""
    with open(os.devnull) as nothing:
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # no socket, or the list's own descriptor
                connection = socket.socket(fileno=int(name))
                family = connection.family
                connection.detach()
                if family in (socket.AF_INET, socket.AF_INET6):
                    # The number stays in use: objects of the server may close it later.
                    os.dup2(nothing.fileno(), int(name))


class Visitors:
    """Lets the token of an API request pay for its leases, as `spaces` does for the events of the page."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._request = importlib.import_module("gradio.context").LocalContext.request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and TOKEN_HEADER in (request := Request(scope)).headers:
            self._request.set(request)
        await self._app(scope, receive, send)
