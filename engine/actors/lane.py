"""Lane: one thread that does pieces of work in order, beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

Result = TypeVar("Result")


class Lane:
    """`run` raises the first error of `submit`. Once it has ended, work that waits or comes later is dropped.

    What that work belongs to ends with the core, or continues in the next one.
    """

    def __init__(self, name: str, initializer: Callable[[], None] | None = None) -> None:
        self._pool = ThreadPoolExecutor(1, name, initializer)
        self._jobs: set[Future[Any]] = set()  # that wait or run
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._is_closed = False

    def call(self, work: Callable[[], Result]) -> asyncio.Future[Result]:
        job = self._pool.submit(work)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        return asyncio.wrap_future(job)

    def submit(self, work: Callable[[], Result], take: Callable[[Result], object] = lambda _: None) -> None:
        """Do this work, and pass its result to `take` on the event loop."""

        def finish(done: asyncio.Future[Result]) -> None:
            if done.cancelled():
                return
            if (error := done.exception()) is None:
                take(done.result())
            elif not self._failed.done():
                self._failed.set_exception(error)

        if not self._is_closed:
            self.call(work).add_done_callback(finish)

    async def run(self) -> None:
        """Wait until cancelled, then for the work at hand."""
        try:
            await self._failed
        finally:
            self._is_closed = True
            self._pool.shutdown(wait=False, cancel_futures=True)
            # Not by a thread that waits: while Python ends there are no new ones.
            if running := [asyncio.wrap_future(each) for each in tuple(self._jobs) if each.running()]:
                await asyncio.wait(running)
