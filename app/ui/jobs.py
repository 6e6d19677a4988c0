"""Work that the server does to its end whether or not a page shows it: an answer of the chat, a batch.

Jobs.start ──▶ a task changes the Job ◀── pages watch it, one or several
A page that was reloaded, or lost its connection, finds its job by the id until it expires. The id is random, so only
the browser that began the job can know it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from app.ui.explain import EXPLAINED, Explanation, explain, explain_bug
from app.ui.pacing import HEARTBEAT_S
from engine import Engine

logger = logging.getLogger("troupe.ui")


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """One piece of work, as far as it has come.

    Attributes:
        is_stopped: a person ended it.
        readers: the sessions of the pages that show it, if the job counts them.
        idle_since: when its last reader left, by the clock of Jobs; None while it has one.
    """

    job_id: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    problem: Explanation | None = None
    is_stopped: bool = False
    is_over: bool = False
    readers: set[str] = field(default_factory=set)
    idle_since: float | None = None
    _task: asyncio.Task[None] | None = None
    _num_changes: int = 0
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_running(self) -> bool:
        return self._task is not None and not self.is_over

    def stop(self) -> None:
        """End the work and abort its requests; the results so far stay."""
        self.is_stopped = not self.is_over
        if self._task is not None:
            self._task.cancel()

    async def watch(self) -> AsyncGenerator[None]:
        """Yield after every change, and periodically as a heartbeat, until the work ends.

        Gradio notices a closed page only when a handler yields.
        """
        seen = 0
        while not self.is_over:
            if seen == self._num_changes:
                with suppress(TimeoutError):
                    async with asyncio.timeout(HEARTBEAT_S):
                        await self._news.wait()
            seen = self._num_changes
            yield

    def finish(self) -> None:
        """Do what is to be done once at the end, before those who watch hear of it."""

    def change(self) -> None:
        """Report a change to those who watch."""
        self._num_changes += 1
        news, self._news = self._news, asyncio.Event()
        news.set()


J = TypeVar("J", bound=Job)


class Jobs(Generic[J]):
    """The jobs that run, and for a while a limited number of those without a reader."""

    def __init__(
        self, engine: Engine, keep_s: float, max_idle: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine = engine
        self._keep_s = keep_s
        self._max_idle = max_idle
        self._clock = clock
        self._kept: dict[str, J] = {}

    def start(self, job: J, work: Coroutine[Any, Any, None]) -> None:
        """Do the work in a task of its own; a job that is over may be started again."""
        job.problem, job.is_stopped, job.is_over = None, False, False
        self._kept[job.job_id] = job
        self.drop_old()
        job._task = asyncio.create_task(self._do(job, work))
        job._task.add_done_callback(lambda task: self._end(job, task))

    def find(self, job_id: str) -> J | None:
        """Return the job with this id; None if it has expired or the server was restarted."""
        self.drop_old()
        return self._kept.get(job_id)

    def take(self, job: J, reader: str) -> None:
        """Keep the job as long as this page shows it."""
        job.readers.add(reader)
        job.idle_since = None

    def release(self, job: J, reader: str) -> None:
        """Let the job expire if no other page shows it; it goes on until then."""
        job.readers.discard(reader)
        if not job.readers:
            job.idle_since = self._clock()
        self.drop_old()

    def drop_old(self) -> None:
        """Stop and drop idle jobs beyond the time and the number."""
        oldest = self._clock() - self._keep_s
        # A copy, because Gradio calls handlers without await in other threads.
        idle = [(job.idle_since, job) for job in list(self._kept.values()) if job.idle_since is not None]
        for number, (since, job) in enumerate(sorted(idle, key=lambda pair: pair[0], reverse=True)):
            if number >= self._max_idle or since < oldest:
                self._kept.pop(job.job_id, None)
                job.stop()

    async def _do(self, job: J, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except EXPLAINED as error:
            job.problem = explain(error, self._engine.state)

    def _end(self, job: J, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a job of the page failed", exc_info=error)
            job.problem = explain_bug(error)
        job.is_over = True
        job.finish()
        if not job.readers and job.idle_since is None:
            job.idle_since = self._clock()
        job.change()
