"""Waiting for what can only be looked at from outside."""

import asyncio
import inspect
import threading
from collections.abc import Callable
from typing import Any


async def wait_until(condition: Callable[[], Any], within_s: float = 60.0) -> None:
    """Poll a condition, which may be awaitable; nothing has an event for it. Fails after `within_s` seconds."""
    async with asyncio.timeout(within_s):
        while not (await found if inspect.isawaitable(found := condition()) else found):
            await asyncio.sleep(0.002)


def list_engine_threads() -> set[threading.Thread]:
    """The threads of all engines in this process; a test compares them with those before it."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("troupe-")}
