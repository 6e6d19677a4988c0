"""Files that people open are read one at a time, in a thread of their own.

asyncio's default threads also write prompts: they must not wait for a slow file.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

READER = ThreadPoolExecutor(1, thread_name_prefix="files")


async def read_apart(read: Callable[..., T], *args: object) -> T:
    """Return `read(*args)` for one file; other visitors' files may be read before it."""
    return await asyncio.get_running_loop().run_in_executor(READER, read, *args)
