"""A server of our own in another process, for benchmarks that are given no address."""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import aiohttp

from app.config import UsageError

START_TIMEOUT_S = 600.0  # a large model loads for minutes
ANSWER_TIMEOUT_S = 60.0  # a program may need this long to listen on a busy machine
READY_LINE = re.compile(r"http://\S+")
MAX_SHOWN = 200  # characters of an answer


@asynccontextmanager
async def run_server(flags: Sequence[str], on_start: Callable[[int], None] = lambda pid: None) -> AsyncIterator[str]:
    """`python -m app serve` with the given flags on a free port, ready to answer; ended with the block.

    Args:
        on_start: called with the process id.
    """
    with tempfile.TemporaryFile() as complaints:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "app", "serve", "--port", "0", "--log-level", "warning", *flags,
            stdout=asyncio.subprocess.PIPE, stderr=complaints,
        )
        on_start(process.pid)
        try:
            assert process.stdout is not None, "it is a pipe"
            try:
                line = await asyncio.wait_for(process.stdout.readline(), START_TIMEOUT_S)
            except TimeoutError:
                raise UsageError(f"the server was not ready within {START_TIMEOUT_S:g} s") from None
            address = READY_LINE.search(line.decode())
            if address is None:
                code = await process.wait()
                complaints.seek(0)
                lines = complaints.read().decode(errors="replace").split("\n")
                raise UsageError(f"the server ended with exit code {code}: {' '.join(lines[-5:])}")
            yield address[0]
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()


async def wait_until_ready(url: str) -> None:
    """Poll /health of a server that was not started here.

    A server that does not answer that it is loading (503) gets a minute only: it may be the wrong one.
    """
    print(f"waiting for {url} ...", file=sys.stderr)
    begun, limit_s, seen = time.monotonic(), ANSWER_TIMEOUT_S, "no answer"
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)) as session:
        while (waited := time.monotonic() - begun) < limit_s:
            try:
                async with session.get(f"{url}/health") as response:
                    text = (await response.content.read(MAX_SHOWN)).decode(errors="replace")
                    seen = f"/health answers {response.status} {' '.join(text.split())}"
                    if response.status == 200:
                        return
                    limit_s = START_TIMEOUT_S if response.status == 503 else ANSWER_TIMEOUT_S
            except aiohttp.InvalidURL as error:
                raise UsageError(f"{url!r} is not the address of a server") from error
            except (aiohttp.ClientError, TimeoutError) as error:
                seen = str(error) or type(error).__name__
            await asyncio.sleep(0.05)
    raise UsageError(f"{url} did not become ready within {waited:.0f} s; the last attempt: {seen}")
