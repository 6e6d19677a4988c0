"""Actor and ThreadActor: an inbox and one owner that empties it, as a task of the loop or as a thread."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Generic, TypeVar

Message = TypeVar("Message")


class Actor(ABC, Generic[Message]):
    """Lives on the event loop. `tell` may only be called there."""

    def __init__(self) -> None:
        self._inbox: deque[Message] = deque()
        self._wake = asyncio.Event()

    def tell(self, message: Message) -> None:
        self._inbox.append(message)
        self._wake.set()

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._inbox:
                self.handle(self._inbox.popleft())
            self.finish_batch()

    @abstractmethod
    def handle(self, message: Message) -> None:
        """Take one message. Never blocks: whatever waits belongs into a thread."""

    def finish_batch(self) -> None:
        """Called when the inbox is empty again."""


class ThreadActor(ABC, Generic[Message]):
    """Lives in one dedicated thread; `run` is its shadow on the loop, which starts, watches and stops it.

    `tell` may be called from any thread. An exception in the thread comes out of `run`.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[Message | None] = SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self.ready = asyncio.Event()
        self._ended: asyncio.Future[None] = self._loop.create_future()

    def tell(self, message: Message) -> None:
        self._queue.put(message)

    async def run(self) -> None:
        # Not a daemon's work to be killed half-way, but the interpreter must be able to exit past a hung step.
        thread = Thread(target=self._run_thread, name=self._name, daemon=True)
        thread.start()
        try:
            await asyncio.shield(self._ended)
        finally:
            self._queue.put(None)
            if not self._ended.done():
                await asyncio.wait([self._ended])
            self._ended.exception()  # mark as seen when the task was cancelled meanwhile
            thread.join()

    def post(self, callback: Callable[..., object], *args: object) -> None:
        """Call back on the loop, from the thread. Nothing happens if the loop is closed."""
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    @abstractmethod
    def work(self) -> None:
        """The thread's life: take messages until None comes."""

    def mark_ready(self) -> None:
        """Say, from the thread, that messages are taken from now on."""
        self.post(self.ready.set)

    def _run_thread(self) -> None:
        try:
            self.work()
        except Exception as error:  # the border of the thread: whatever it was goes to the loop
            self.post(self._ended.set_exception, error)
        except BaseException as error:
            # As itself, an exit would end the loop and with it the whole program.
            end = RuntimeError(f"the thread {self._name} was ended by {type(error).__name__}")
            end.__cause__ = error
            self.post(self._ended.set_exception, end)
        else:
            self.post(self._ended.set_result, None)
