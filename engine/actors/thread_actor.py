"""ThreadActor: an inbox whose messages one thread handles in order."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from queue import Queue
from threading import Thread
from typing import Generic, TypeVar

Message = TypeVar("Message")


class ThreadActor(ABC, Generic[Message]):
    """An actor that runs in its own thread; `run`, on the event loop, starts, watches and stops the thread.

    `tell` may be called from any thread. `run` raises an exception of the thread. When it is cancelled, messages that
    wait are dropped: what they belong to ends with the core, or continues in the next one.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        # Not a SimpleQueue: CPython 3.11's waits without limit if its thread is late by the timeout.
        self._queue: Queue[Message | None] = Queue()
        self.tell: Callable[[Message], None] = self._queue.put
        self._loop = asyncio.get_running_loop()
        self.ready = asyncio.Event()
        self.is_ending = False  # the thread shall end after the piece of work at hand
        self._ended: asyncio.Future[None] = self._loop.create_future()

    async def run(self) -> None:
        # A daemon, so that the interpreter can exit while a step hangs.
        thread = Thread(target=self._run_thread, name=self._name, daemon=True)
        thread.start()
        try:
            await asyncio.shield(self._ended)
        finally:
            self.is_ending = True
            with self._queue.mutex:
                self._queue.queue.clear()
            self._queue.put(None)
            if not self._ended.done():
                await asyncio.wait([self._ended])
            self._ended.exception()  # mark as retrieved if the task was cancelled
            thread.join()

    def post(self, callback: Callable[..., object], *args: object) -> None:
        """Schedule a callback on the loop, from the thread. Does nothing if the loop is closed."""
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    @abstractmethod
    def work(self) -> None:
        """Handle messages in the thread until None arrives."""

    def mark_ready(self) -> None:
        self.post(self.ready.set)

    def _run_thread(self) -> None:
        try:
            self.work()
        except Exception as error:  # the border of the thread: `run` raises it
            self.post(self._ended.set_exception, error)
        except BaseException as error:
            # asyncio lets SystemExit and KeyboardInterrupt end the event loop.
            end = RuntimeError(f"the thread {self._name} was ended by {type(error).__name__}")
            end.__cause__ = error
            self.post(self._ended.set_exception, end)
        else:
            self.post(self._ended.set_result, None)
