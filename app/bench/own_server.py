"""A server of our own in another process, for benchmarks that are given no address."""

from __future__ import annotations

import asyncio
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import aiohttp

from app.config import UsageError

START_TIMEOUT_S = 600.0


@asynccontextmanager
async def run_server(
    flags: Sequence[str], on_start: Callable[[int], None] = lambda pid: None
) -> AsyncIterator[str]:
    """`python -m app serve` with the given flags on a free port, ready to answer; ended with the block.

    Args:
        on_start: told the id of its process.

    Raises:
        UsageError: it did not come up.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as complaints:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "app", "serve", "--port", str(port), "--log-level", "warning", *flags,
            stdout=asyncio.subprocess.DEVNULL, stderr=complaints,
        )  # fmt: skip
        on_start(process.pid)
        try:
            try:
                await wait_until_ready(url, process)
            except UsageError as error:
                complaints.seek(0)
                lines = complaints.read().decode(errors="replace").split("\n")
                raise UsageError(f"{error}: {' '.join(lines[-5:])}") from error
            yield url
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()


async def wait_until_ready(url: str, process: asyncio.subprocess.Process | None = None) -> None:
    """Poll /health.

    Raises:
        UsageError: the process ended instead, or nothing came within ten minutes.
    """
    try:
        async with asyncio.timeout(START_TIMEOUT_S), aiohttp.ClientSession() as session:
            while process is None or process.returncode is None:
                try:
                    async with session.get(f"{url}/health") as response:
                        if response.status == 200:
                            return
                except aiohttp.ClientConnectionError:
                    pass  # not listening yet
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise UsageError(f"the server did not become ready within {START_TIMEOUT_S:.0f} s") from None
    raise UsageError(f"the server ended with exit code {process.returncode} instead of becoming ready")
