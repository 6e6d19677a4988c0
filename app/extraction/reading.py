"""Files are read in threads of their own, for the API and the page alike.

asyncio's default threads also write prompts: they must not wait for a slow file. PDF and office files are read by a
process that its thread waits for; other files are read in the thread itself, so fewer of them run at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from pathlib import PurePath
from typing import TypeVar

from app.extraction.sources import IMAGE_TYPES, OFFICE_TYPES

T = TypeVar("T")

CHILD_THREADS = ThreadPoolExecutor(4, thread_name_prefix="children")
FILE_THREADS = ThreadPoolExecutor(2, thread_name_prefix="files")


async def read_apart(name: str | PurePath, read: Callable[..., T], *args: object) -> T:
    """Return `read(*args)` for a file of that name; others' files of its kind may be read before it."""
    is_child = PurePath(name).suffix.lower() in (".pdf", ".zip", *IMAGE_TYPES, *OFFICE_TYPES)
    threads = CHILD_THREADS if is_child else FILE_THREADS
    work = partial(copy_context().run, read, *args)
    return await asyncio.get_running_loop().run_in_executor(threads, work)
