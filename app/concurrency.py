"""Many coroutines, a limited number of them at once; retries while the engine's queue is full; the end of a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Coroutine, Iterable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from engine import EngineOverloaded

T = TypeVar("T")
RETRY_S = 0.5  # seconds between two attempts at least


async def retry_while_full(work: Callable[[], Awaitable[T]]) -> T:
    """Return the result of some work, which is begun again while the engine's queue is full."""
    while True:
        try:
            return await work()
        except EngineOverloaded as error:
            await asyncio.sleep(max(error.retry_after_s, RETRY_S))


async def take_last(stream: AsyncGenerator[T, None]) -> T:
    """Run a generator to its end and return the last of what it yields, which is at least one thing."""
    async with aclosing(stream):
        async for each in stream:
            last = each
    return last


async def cancel_all(tasks: Collection[asyncio.Future[Any]]) -> None:
    """Cancel tasks, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def run_bounded(works: Iterable[Coroutine[Any, Any, T]], limit: int) -> AsyncGenerator[T, None]:
    """Yield results as they come. The first error, or closing the generator, cancels the works that run.

    Args:
        works: an iterator makes each work when there is room for it.
    """
    waiting = iter(works)
    running: set[asyncio.Task[T]] = set()
    done: set[asyncio.Task[T]] = set()
    try:
        while True:
            while len(running) < limit and (work := next(waiting, None)) is not None:
                running.add(asyncio.ensure_future(work))
            if not running:
                return
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                yield task.result()
    finally:
        await cancel_all(running)
        await asyncio.gather(*done, return_exceptions=True)


async def run_in_order(works: Iterable[Coroutine[Any, Any, T]], limit: int) -> AsyncGenerator[T, None]:
    """Yield results in the order of the works; those before the first error all come. Closing cancels the rest."""
    waiting = iter(works)
    running: list[asyncio.Task[T]] = []
    try:
        while True:
            while len(running) < limit and (work := next(waiting, None)) is not None:
                running.append(asyncio.ensure_future(work))
            if not running:
                return
            yield await running[0]
            del running[0]
    finally:
        await cancel_all(running)


async def gather_bounded(works: Iterable[Coroutine[Any, Any, T]], limit: int) -> list[T]:
    """Return all results in the order of the works."""

    async def number(index: int, work: Coroutine[Any, Any, T]) -> tuple[int, T]:
        return index, await work

    numbered = (number(index, work) for index, work in enumerate(works))
    results = [result async for result in run_bounded(numbered, limit)]
    return [result for _, result in sorted(results, key=lambda pair: pair[0])]


async def merge_streams(streams: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[T]:
    """Yield what several generators yield, as it comes; each goes on once its last item was used. Closing ends all."""
    waiting: asyncio.Queue[tuple[T, asyncio.Event] | None] = asyncio.Queue()

    async def run(stream: AsyncGenerator[T]) -> None:
        async with aclosing(stream):
            async for item in stream:
                used = asyncio.Event()
                waiting.put_nowait((item, used))
                await used.wait()

    async def run_all() -> None:
        try:
            await gather_bounded(map(run, streams), len(streams))
        finally:
            waiting.put_nowait(None)

    work = asyncio.ensure_future(run_all())
    try:
        while (found := await waiting.get()) is not None:
            yield found[0]
            found[1].set()
        await work
    finally:
        await cancel_all([work])
