"""Paces an engine stream for a browser: at most 8 updates a second, and a sign of life while nothing comes.

Gradio notices a closed tab only when a handler yields, so silence must not last (a waiting request
would stay queued); and every yield costs it a third of a millisecond, so tokens are not sent one by one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TypeVar

from app.concurrency import cancel_all

T = TypeVar("T")

UPDATE_INTERVAL_S = 1 / 8
HEARTBEAT_S = 0.25


async def pace(
    stream: AsyncGenerator[T, None], interval_s: float = UPDATE_INTERVAL_S, heartbeat_s: float = HEARTBEAT_S
) -> AsyncGenerator[T | None, None]:
    """Yield the items of a stream that merges for slow readers, None as a heartbeat; closing this closes the stream."""
    pending: asyncio.Future[T] | None = None
    try:
        while True:
            pending = pending or asyncio.ensure_future(anext(stream))
            # Not wait_for: a timeout must not cancel the read, that would abort the request.
            done, _ = await asyncio.wait({pending}, timeout=heartbeat_s)
            if not done:
                yield None
                continue
            read, pending = pending, None
            try:
                item = read.result()
            except StopAsyncIteration:
                return
            yield item
            # The engine merges what it makes in the meantime.
            await asyncio.sleep(interval_s)
    finally:
        await cancel_all([] if pending is None else [pending])
        await stream.aclose()
