"""The listening socket, uvicorn on it, and the signals that end it; shared by all servers."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from app.api.http_limits import BoundedHttp
from app.concurrency import cancel_all
from app.config import AppConfig, UsageError

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Server(uvicorn.Server):
    """A uvicorn server without signal handlers: its own would end the process before the engine is closed."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers."""
        yield


@contextmanager
def bind(app_config: AppConfig) -> Iterator[socket.socket]:
    """Open the listening socket before slow work, so that a taken port is reported at once."""
    host, port = app_config.host, app_config.port
    if app_config.uds is not None:
        with bind_path(Path(app_config.uds)) as listener:
            yield listener
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio disables Nagle's algorithm only if the protocol is named. Otherwise answers wait up to 40 ms for the
    # client's acknowledgement of their headers.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise UsageError(
                f"cannot listen on {host}:{port}: {reason}; choose another with --port or --host"
            ) from None
        yield listener


@contextmanager
def bind_path(path: Path) -> Iterator[socket.socket]:
    """Listen on a Unix domain socket, which is removed at the end; a stale one is replaced."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            if path.is_socket():
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                    if probe.connect_ex(str(path)):
                        path.unlink()
            listener.bind(str(path))
            listener.listen()
        except OSError as error:
            raise UsageError(f"cannot listen on --uds {path}: {error.strerror or error}") from None
        try:
            yield listener
        finally:
            path.unlink(missing_ok=True)


def describe_address(app_config: AppConfig, listener: socket.socket) -> str:
    """Return the server's address for people."""
    if app_config.uds is not None:
        return f"unix:{app_config.uds}"
    host = "127.0.0.1" if app_config.host in ("0.0.0.0", "::") else app_config.host
    scheme = "http" if app_config.ssl_certfile is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


@asynccontextmanager
async def run_uvicorn(
    app: ASGIApp, listener: socket.socket, stop: asyncio.Event, app_config: AppConfig
) -> AsyncIterator[None]:
    """Serve on the socket until the block ends."""
    settings = uvicorn.Config(
        app,
        http=BoundedHttp,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        # longer than clients keep idle connections, so that the server does not close one while a request arrives
        timeout_keep_alive=30,
        timeout_graceful_shutdown=1,
        ssl_certfile=app_config.ssl_certfile,
        ssl_keyfile=app_config.ssl_keyfile,
    )
    try:
        settings.load()
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"cannot use --ssl-certfile {app_config.ssl_certfile} with its key: {error}") from None
    server = Server(settings)
    task = asyncio.ensure_future(server.serve([listener]))
    task.add_done_callback(lambda _: stop.set())
    try:
        yield
    finally:
        # An open page holds an endless stream; uvicorn would report its cancellation as an error.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        server.should_exit = True
        await task


@contextmanager
def stop_on_signals(on_stop: Callable[[], None]) -> Iterator[asyncio.Event]:
    """Return an event that the first SIGINT or SIGTERM sets; a second signal ends the process at once."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    num_signals = 0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal num_signals
        num_signals += 1
        if num_signals > 1:
            os._exit(128 + number)
        loop.call_soon_threadsafe(stop.set)
        on_stop()

    previous = {number: signal.signal(number, handle) for number in STOP_SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


async def finish_unless(stop: asyncio.Event, work: Awaitable[None]) -> bool:
    """Run the work, but cancel it if `stop` is set first. Returns whether it finished."""
    task = asyncio.ensure_future(work)
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((task, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            return False
        await task
        return True
    finally:
        await cancel_all((task, stopping))
