"""A server of our own in another process, for benchmarks that are given no address."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import aiohttp

from app.config import UsageError

START_TIMEOUT_S = 600.0  # a large model loads for minutes
ANSWER_TIMEOUT_S = 60.0  # a program may need this long to listen on a busy machine
READY_LINE = re.compile(r"http://\S+")
MAX_SHOWN = 200  # characters of an answer


@asynccontextmanager
async def run_server(
    flags: Sequence[str], on_start: Callable[[int], None] = lambda pid: None
) -> AsyncIterator[str]:
    """`python -m app serve` with the given flags on a free port, ready to answer; ended with the block.

    Args:
        on_start: called with the process id.

    Raises:
        UsageError: it did not come up.
    """
    with tempfile.TemporaryFile() as complaints:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "app", "serve", "--port", "0", "--log-level", "warning", *flags,
            stdout=asyncio.subprocess.PIPE, stderr=complaints,
        )  # fmt: skip
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
    """Poll /health of a server that is not ours; stderr says who is waited for and what they answer.

    A server that does not say that it is about to be ready (503) gets a minute only: it may be the wrong one.

    Raises:
        UsageError: the time was over; the message says what came last.
    """
    seen = "no answer"
    print(f"waiting for {url} ...", file=sys.stderr)
    loop = asyncio.get_running_loop()
    begun = loop.time()
    try:
        async with (
            asyncio.timeout(ANSWER_TIMEOUT_S) as limit,
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session,
        ):
            while True:
                status, answer = await ask_health(session, url)
                if status == 200:
                    return
                if status == 503:
                    limit.reschedule(min(begun + START_TIMEOUT_S, loop.time() + ANSWER_TIMEOUT_S))
                if answer != seen:
                    print(f"waiting for {url}: {answer}", file=sys.stderr)
                seen = answer
                await asyncio.sleep(0.05)
    except TimeoutError:
        waited = f"{loop.time() - begun:.0f} s"
        raise UsageError(f"{url} did not become ready within {waited}; the last attempt: {seen}") from None


async def ask_health(session: aiohttp.ClientSession, url: str) -> tuple[int, str]:
    """The status of /health, 0 without one, and what came in words.

    Raises:
        UsageError: no request can be sent to such an address.
    """
    try:
        async with session.get(f"{url}/health") as response:
            text = (await response.content.read(MAX_SHOWN)).decode(errors="replace")
            return response.status, f"/health answers {response.status} {' '.join(text.split())}".rstrip()
    except aiohttp.InvalidURL as error:
        raise UsageError(f"{url!r} is no address of a server") from error
    except aiohttp.ClientError as error:
        # its own words for a refused connection do not say that it was refused
        number = getattr(error, "errno", None) or 0
        return 0, os.strerror(number) if number > 0 else str(error) or type(error).__name__
