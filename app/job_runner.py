"""JobRunner: works on the jobs of the store until their rows have ended, also after a restart.

    store ──claim──▶ worker ──answer──▶ end_row ──▶ store       MAX_ROWS workers for each of MAX_JOBS jobs
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from app.concurrency import cancel_all
from app.store import Item, Store, StoreError, StoreFull, jobs
from engine import Engine, EngineDead, EngineSleeping

logger = logging.getLogger("troupe.jobs")

MAX_JOBS = 4  # at once; the others wait in the order in which they came
MAX_ROWS = 16  # of a job at once
LOOK_S = 1.0  # between two looks whether the engine and the disk are ready for the jobs that wait


@dataclass(frozen=True, slots=True)
class RowAnswer:
    """The result of a row, as JSON text; a failed row may be tried again."""

    text: str
    is_failed: bool


AnswerRow = Callable[[str], Awaitable[RowAnswer]]
# Makes the function that answers the rows of a job; None while the server cannot, because it has another model.
MakeAnswer = Callable[[Item], AnswerRow | None]


class JobRunner:
    """Works on the jobs of all owners."""

    def __init__(self, store: Store, engine: Engine) -> None:
        self._store = store
        self._engine = engine
        self._running: dict[int, asyncio.Task[None]] = {}
        self._news = asyncio.Event()

    def wake(self) -> None:
        """Look for new jobs at once."""
        self._news.set()

    async def stop(self, number: int) -> None:
        """End the work on a job, if there is any; its unfinished rows wait again."""
        if (task := self._running.get(number)) is not None:
            await cancel_all([task])
        await self._store.run(jobs.release, number)

    async def run(self, make_answer: MakeAnswer) -> None:
        """Work on jobs until cancelled."""
        await self._store.run(jobs.release)
        try:
            while True:
                self._news.clear()
                try:
                    unfinished = await self._store.run(jobs.find_unfinished)
                except StoreError as error:
                    logger.warning("jobs wait: %s", error)
                    await asyncio.sleep(LOOK_S)
                    continue
                if self._engine.state == "ready":
                    for job in unfinished:
                        self._begin(job, make_answer)
                waits = any(job.number not in self._running for job in unfinished)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), LOOK_S if waits else None)
        finally:
            await cancel_all(self._running.values())

    def _begin(self, job: Item, make_answer: MakeAnswer) -> None:
        if job.number in self._running or len(self._running) >= MAX_JOBS:
            return
        if (answer := make_answer(job)) is None:
            return
        task = self._running[job.number] = asyncio.create_task(self._work(job, answer))
        task.add_done_callback(lambda _: self._end(job.number))

    def _end(self, number: int) -> None:
        del self._running[number]
        self.wake()

    async def _work(self, job: Item, answer: AnswerRow) -> None:
        try:
            # rows of an attempt that could not go on
            await self._store.run(jobs.release, job.number)
            await self._finish(job, answer)
        except (EngineDead, EngineSleeping, StoreError) as error:
            logger.warning("the job %s waits: %s", job.id, error)
            await asyncio.sleep(LOOK_S)

    async def _finish(self, job: Item, answer: AnswerRow) -> None:
        workers: list[asyncio.Future[None]] = []
        try:
            await self._store.run(jobs.set_status, job.number, "running")
            workers += [asyncio.ensure_future(self._answer_rows(job.number, answer)) for _ in range(MAX_ROWS)]
            await asyncio.gather(*workers)
            await self._store.run(jobs.end_job, job.number, "completed")
        except StoreFull as error:
            logger.warning("the job %s ends: %s", job.id, error)
            await self._store.run(jobs.end_job, job.number, "cancelled", str(error))
        except (EngineDead, EngineSleeping, StoreError):
            raise
        except Exception as error:
            # the border of the job: begun again, it would fail again
            logger.exception("the job %s ends", job.id)
            await self._store.run(jobs.end_job, job.number, "cancelled", f"internal error: {type(error).__name__}")
        finally:
            await cancel_all(workers)

    async def _answer_rows(self, job: int, answer: AnswerRow) -> None:
        while (row := await self._store.run(jobs.claim, job)) is not None:
            number, given = row
            done = await answer(given)
            await self._store.run(jobs.end_row, job, number, done.text, done.is_failed)
