"""Silence is filled with heartbeats, and closing the pacer closes what it reads."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from app.ui.pacing import pace


class Source:
    """A stream that waits for a signal before its first item, and notes how it ended."""

    def __init__(self, *items: int, error: Exception | None = None) -> None:
        self.items = items
        self.error = error
        self.go = asyncio.Event()
        self.is_closed = False

    async def stream(self) -> AsyncGenerator[int, None]:
        try:
            await self.go.wait()
            for item in self.items:
                yield item
            if self.error is not None:
                raise self.error
        finally:
            self.is_closed = True


async def test_heartbeats_come_until_the_first_item() -> None:
    source = Source(1, 2)
    paced = pace(source.stream(), interval_s=0, heartbeat_s=0.001)
    assert [await anext(paced), await anext(paced)] == [None, None]
    source.go.set()
    assert [item async for item in paced if item is not None] == [1, 2]
    assert source.is_closed


async def test_closing_during_silence_closes_the_stream() -> None:
    source = Source(1)
    paced = pace(source.stream(), heartbeat_s=0.001)
    await anext(paced)
    await paced.aclose()
    assert source.is_closed


async def test_closing_between_items_closes_the_stream() -> None:
    source = Source(1, 2)
    source.go.set()
    paced = pace(source.stream())
    assert await anext(paced) == 1
    await paced.aclose()
    assert source.is_closed


async def test_cancelling_the_reader_closes_the_stream() -> None:
    source = Source(1)
    paced = pace(source.stream(), heartbeat_s=60)
    reader = asyncio.ensure_future(anext(paced))
    await asyncio.sleep(0)
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    assert source.is_closed


async def test_the_streams_error_comes_through() -> None:
    source = Source(1, error=ValueError("broken"))
    source.go.set()
    paced = pace(source.stream(), interval_s=0)
    assert await anext(paced) == 1
    with pytest.raises(ValueError, match="broken"):
        await anext(paced)


async def test_items_are_spaced_so_that_the_source_can_merge() -> None:
    source = Source(1, 2)
    source.go.set()
    loop = asyncio.get_running_loop()
    paced = pace(source.stream(), interval_s=0.05)
    await anext(paced)
    start = loop.time()
    await anext(paced)
    assert loop.time() - start >= 0.045
    await paced.aclose()
