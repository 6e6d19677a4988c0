"""Which silence ends a core: that of a stopped process, and not that of a busy one or of a paused machine."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from engine.cluster.connection import End, LinkConnection
from engine.wire.frames import Link
from engine.wire.link_messages import Asleep, CoreFailed

TIMEOUT_S = 0.4


class FakeLink:
    """Receives what `arrive` gets, until it is aborted."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[Any] = asyncio.Queue()

    async def receive(self) -> Any:
        if (message := await self.messages.get()) is None:
            raise ConnectionError("aborted")
        return message

    def abort(self) -> None:
        self.messages.put_nowait(None)


class OwnProcess:
    """This process, whose main thread runs, in place of a core process."""

    returncode = 0

    def __init__(self) -> None:
        self.pid = os.getpid()

    async def wait(self) -> int:
        return 0


@asynccontextmanager
async def connect(process: Any) -> AsyncIterator[tuple[FakeLink, asyncio.Task[End], list[Any]]]:
    """Run a connection to a loaded core that sends nothing by itself."""
    link, received = FakeLink(), list[Any]()
    connection = LinkConnection(cast(Link, link), TIMEOUT_S, process)
    connection._is_loading = False
    running = asyncio.create_task(connection.run(received.append))
    await asyncio.sleep(0)
    yield link, running, received
    link.abort()
    await asyncio.wait([running])


@pytest.mark.parametrize("is_stopped", [True, False])
async def test_a_stopped_or_sleeping_process_is_ended(is_stopped: bool) -> None:
    process = await asyncio.create_subprocess_exec("sleep", "60")
    if is_stopped:
        process.send_signal(signal.SIGSTOP)
    async with connect(process) as (_, running, received):
        end = await running
    assert end.cause == "it sent nothing for 0.4 s" and end.crash is None
    assert [message.kind for message in received if isinstance(message, CoreFailed)] == ["silence"]
    assert process.returncode == -signal.SIGKILL


async def test_a_process_that_waits_for_the_processor_is_not_ended() -> None:
    async with connect(OwnProcess()) as (_, running, received):
        await asyncio.sleep(3 * TIMEOUT_S)
        assert not running.done() and not received


async def test_a_pause_of_the_machine_does_not_end_a_core() -> None:
    async with connect(None) as (link, running, received):
        await asyncio.sleep(TIMEOUT_S / 2)
        time.sleep(3 * TIMEOUT_S)  # noqa: ASYNC251
        await asyncio.sleep(TIMEOUT_S / 4)
        link.messages.put_nowait(Asleep())
        await asyncio.sleep(TIMEOUT_S / 2)
        assert not running.done() and received == [Asleep()]


class EndingProcess(OwnProcess):
    """Ends just when it is killed."""

    returncode = None  # type: ignore[assignment]
    is_over = False

    async def wait(self) -> int:
        if not self.is_over:
            await asyncio.Event().wait()
        return -signal.SIGKILL

    def kill(self) -> None:
        self.is_over = True
        raise ProcessLookupError


async def test_a_process_that_ends_just_before_it_is_killed_has_ended() -> None:
    async with connect(EndingProcess()) as (link, running, _):
        link.abort()
        assert (await running).crash is None
