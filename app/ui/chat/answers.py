"""Answers of the chat, generated to their end whether or not a page shows them.

begin ──▶ Answers.start ──▶ a task reads the engine's stream into an Answer ◀── pages watch it, one or several
A page that was reloaded finds its answer by the id, until ten minutes after the end. The id is random, so only the
browser that asked can know it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field

from app.reasoning import Thinking
from app.ui.explain import EXPLAINED, Explanation, explain, explain_bug
from app.ui.pacing import HEARTBEAT_S
from engine import Engine, RequestOutput

logger = logging.getLogger("troupe.ui")

KEEP_S = 600.0
MAX_KEPT = 512  # answers that have ended


@dataclass(slots=True, eq=False)
class Answer:
    """One answer, as far as it has been generated.

    Attributes:
        thinking: how the text is split into reasoning and content; None if all of it is content.
        is_stopped: a person ended it.
        ended: time of the end by the clock of Answers.
    """

    answer_id: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    output: RequestOutput | None = None
    problem: Explanation | None = None
    thinking: Thinking | None = None
    is_stopped: bool = False
    is_over: bool = False
    ended: float = 0.0
    _task: asyncio.Task[None] | None = None
    _num_changes: int = 0
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def stop(self) -> None:
        """End the answer and abort its request; the text so far stays."""
        self.is_stopped = not self.is_over
        if self._task is not None:
            self._task.cancel()

    async def watch(self) -> AsyncGenerator[None]:
        """Yield after every change, and periodically as a heartbeat, until the answer ends.

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

    def _change(self) -> None:
        self._num_changes += 1
        news, self._news = self._news, asyncio.Event()
        news.set()


class Answers:
    """All answers that are being generated, and for a while those that have ended."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self._kept: dict[str, Answer] = {}

    def start(self, make_stream: Callable[[Answer], AsyncGenerator[RequestOutput | None]]) -> Answer:
        """Read a stream to its end in a task of its own."""
        answer = Answer()
        self._drop_old()
        self._kept[answer.answer_id] = answer
        answer._task = asyncio.create_task(self._read(answer, make_stream(answer)))
        answer._task.add_done_callback(lambda task: self._end(answer, task))
        return answer

    def find(self, answer_id: str) -> Answer | None:
        """Return the answer with this id; None if it has expired or the server was restarted."""
        self._drop_old()
        return self._kept.get(answer_id)

    async def _read(self, answer: Answer, stream: AsyncGenerator[RequestOutput | None]) -> None:
        try:
            # Leaving the block closes the stream, which aborts the engine's request.
            async with aclosing(stream):
                async for output in stream:
                    if output is not None:
                        answer.output = output
                        answer._change()
        except EXPLAINED as error:
            answer.problem = explain(error, self._engine.state)

    def _end(self, answer: Answer, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("an answer failed", exc_info=error)
            answer.problem = explain_bug(error)
        answer.is_over, answer.ended = True, self._clock()
        answer._change()

    def _drop_old(self) -> None:
        oldest = self._clock() - KEEP_S
        # A copy, because Gradio calls handlers without await in other threads.
        ended = [each for each in list(self._kept.values()) if each.is_over]
        for number, answer in enumerate(sorted(ended, key=lambda each: each.ended, reverse=True)):
            if number >= MAX_KEPT or answer.ended < oldest:
                self._kept.pop(answer.answer_id, None)
