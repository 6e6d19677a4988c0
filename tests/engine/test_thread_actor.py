"""ThreadActor: order, batches, crashes and ends."""

import asyncio
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from queue import Empty

import pytest

from engine.actors.lane import Lane
from engine.actors.thread_actor import ThreadActor
from tests.waiting import wait_until


class ThreadListener(ThreadActor[str]):
    """Notes what it hears; "burn" kills it."""

    def __init__(self, on_message: Callable[[str], None] | None = None) -> None:
        super().__init__("troupe-test")
        self.heard: list[str] = []
        self.thread: threading.Thread | None = None
        self._on_message = on_message

    def work(self) -> None:
        self.thread = threading.current_thread()
        self.mark_ready()
        while (message := self._queue.get()) is not None:
            if message == "burn":
                raise RuntimeError("on fire")
            self.heard.append(message)
            if self._on_message is not None:
                self.post(self._on_message, message)


@asynccontextmanager
async def running(actor: ThreadActor[str]) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(actor.run())
    try:
        await actor.ready.wait()
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, RuntimeError):
            await task


class LateWaiter(ThreadActor[str]):
    """Waits for a message for 50 ms."""

    def work(self) -> None:
        with pytest.raises(Empty):
            self._queue.get(timeout=0.05)


async def test_a_wait_ends_although_its_thread_was_stopped_beyond_the_deadline() -> None:
    """SimpleQueue of CPython 3.11 then waits without limit; the handler of a signal stops the thread here."""
    actor = LateWaiter("troupe-test")
    previous = signal.signal(signal.SIGUSR1, lambda *_: time.sleep(0.2))
    threads = [
        threading.Timer(0.01, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1)),
        threading.Timer(2.0, actor.tell, ("too late",)),
    ]
    try:
        for thread in threads:
            thread.start()
        actor.work()
    finally:
        for thread in threads:
            thread.cancel()
            thread.join()
        signal.signal(signal.SIGUSR1, previous)


async def test_an_exception_comes_out_of_run() -> None:
    actor = ThreadListener()
    async with running(actor) as task:
        actor.tell("burn")
        with pytest.raises(RuntimeError, match="on fire"):
            await task
    assert actor.thread is not None and not actor.thread.is_alive()


class GatedListener(ThreadActor[threading.Event]):
    """Waits for each event that it hears."""

    num_heard = 0

    def work(self) -> None:
        while (message := self._queue.get()) is not None:
            self.num_heard += 1
            self.mark_ready()
            message.wait(10)


async def test_an_end_finishes_the_message_at_hand_and_drops_those_that_wait() -> None:
    actor, gate = GatedListener("troupe-test"), threading.Event()
    for _ in range(25):
        actor.tell(gate)
    task = asyncio.create_task(actor.run())
    await actor.ready.wait()
    task.cancel()
    await wait_until(lambda: actor.is_ending)
    gate.set()
    await asyncio.wait([task])
    assert actor.num_heard == 1


async def test_a_post_is_called_on_the_loop() -> None:
    posted = []
    actor = ThreadListener(on_message=lambda _: posted.append(threading.current_thread()))
    async with running(actor):
        actor.tell("a")
        await wait_until(lambda: bool(posted))
    assert posted[0] is threading.current_thread() and actor.heard == ["a"]
    assert actor.thread is not None and not actor.thread.is_alive()
    assert actor.thread is not posted[0] and actor.thread.name == "troupe-test"


async def test_a_crash_ends_its_task_group_and_joins_the_others() -> None:
    healthy, ill = ThreadListener(), ThreadListener()
    ill.tell("burn")
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(healthy.run())
            tasks.create_task(ill.run())
    assert [str(error) for error in caught.value.exceptions] == ["on fire"]
    assert healthy.thread is not None
    assert not healthy.thread.is_alive()


def test_a_post_to_a_closed_loop_is_dropped() -> None:
    """The interpreter may end before a hung step does."""

    async def make() -> ThreadListener:
        return ThreadListener()

    actor = asyncio.run(make())
    actor.post(print, "never")


async def test_a_lane_works_in_order_and_drops_what_waits_when_it_ends() -> None:
    lane, taken, begun, may_go = Lane("test"), list[int](), threading.Event(), threading.Event()
    running = asyncio.create_task(lane.run())
    lane.submit(lambda: 1, taken.append)
    await lane.call(lambda: None)
    assert taken == [1]
    lane.submit(lambda: begun.set() or (may_go.wait() and 2), taken.append)
    lane.submit(lambda: 3, taken.append)
    await asyncio.to_thread(begun.wait)
    running.cancel()
    asyncio.get_running_loop().call_later(0.02, may_go.set)
    await asyncio.wait([running])
    lane.submit(lambda: 4, taken.append)  # as of a core that has crashed
    await asyncio.sleep(0)
    assert taken == [1, 2]


async def test_an_error_ends_a_lane() -> None:
    lane = Lane("test")
    lane.submit(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        await lane.run()
