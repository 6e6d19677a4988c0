"""Actor and ThreadActor: order, batches, crashes and ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from engine.actors.actor import Actor, ThreadActor
from tests.waiting import wait_until


class Listener(Actor[str]):
    """Notes what it hears; "burn" kills it."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def handle(self, message: str) -> None:
        if message == "burn":
            raise RuntimeError("on fire")
        if message == "echo":
            self.tell("from itself")
        self.heard.append(message)

    def finish_batch(self) -> None:
        self.heard.append("|")


class ThreadListener(ThreadActor[str]):
    """The same in a thread."""

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
async def running(actor: Actor[str] | ThreadActor[str]) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(actor.run())
    try:
        if isinstance(actor, ThreadActor):
            await actor.ready.wait()
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, RuntimeError):
            await task


async def test_messages_are_handled_in_order_and_batches_are_closed_once() -> None:
    actor = Listener()
    async with running(actor):
        for message in ("a", "b", "c"):
            actor.tell(message)
        await wait_until(lambda: "|" in actor.heard)
        actor.tell("d")
        await wait_until(lambda: "d" in actor.heard)
    assert actor.heard == ["a", "b", "c", "|", "d", "|"]


async def test_what_an_actor_tells_itself_belongs_to_the_batch() -> None:
    actor = Listener()
    async with running(actor):
        actor.tell("echo")
        await wait_until(lambda: "|" in actor.heard)
    assert actor.heard[:3] == ["echo", "from itself", "|"]


async def test_an_actor_is_told_things_before_it_runs() -> None:
    actor = Listener()
    actor.tell("early")
    async with running(actor):
        await wait_until(lambda: "early" in actor.heard)


async def test_an_exception_comes_out_of_run() -> None:
    actor = Listener()
    async with running(actor) as task:
        actor.tell("burn")
        with pytest.raises(RuntimeError, match="on fire"):
            await task


async def test_an_exception_in_the_thread_comes_out_of_run() -> None:
    actor = ThreadListener()
    async with running(actor) as task:
        actor.tell("burn")
        with pytest.raises(RuntimeError, match="on fire"):
            await task
    assert actor.thread is not None
    assert not actor.thread.is_alive()


async def test_a_stop_finishes_the_message_at_hand_and_joins_the_thread() -> None:
    actor = ThreadListener()
    async with running(actor):
        for message in ("a", "b"):
            actor.tell(message)
    assert actor.heard == ["a", "b"]
    assert actor.thread is not None
    assert not actor.thread.is_alive()


async def test_the_work_of_a_thread_actor_is_not_on_the_loop() -> None:
    actor = ThreadListener()
    async with running(actor):
        assert actor.thread is not threading.current_thread()
        assert actor.thread is not None
        assert actor.thread.name == "troupe-test"


async def test_a_post_is_called_on_the_loop() -> None:
    threads = []
    actor = ThreadListener(on_message=lambda _: threads.append(threading.current_thread()))
    async with running(actor):
        actor.tell("a")
        await wait_until(lambda: bool(threads))
    assert threads == [threading.current_thread()]


async def test_a_thread_actor_may_be_told_from_any_thread() -> None:
    actor = ThreadListener()
    async with running(actor):
        tellers = [threading.Thread(target=actor.tell, args=(f"{n}",)) for n in range(20)]
        for teller in tellers:
            teller.start()
        for teller in tellers:
            teller.join()
        await wait_until(lambda: len(actor.heard) == 20)
    assert sorted(actor.heard, key=int) == [f"{n}" for n in range(20)]


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
