"""Answers of the chat, saved once a second and at the end. A reloaded page finds the tokens for ten minutes."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from app.reasoning import Thinking
from app.ui.jobs import Job, Jobs
from engine import Engine, RequestOutput

KEEP_S = 600.0
MAX_KEPT = 512  # answers that have ended
SAVE_S = 1.0


@dataclass(slots=True, eq=False, kw_only=True)
class Answer(Job):
    """One answer, as far as it has been generated.

    Attributes:
        thinking: how the text is split into reasoning and content; None if all of it is content.
        write: begins to write the answer into the store.
        written: the last writing.
    """

    output: RequestOutput | None = None
    thinking: Thinking | None = None
    write: Callable[[], Future[Any]] | None = None
    written: Future[Any] | None = None

    def save(self) -> None:
        """Write the answer into the store."""
        if self.write is not None:
            self.written = self.write()

    def finish(self) -> None:
        self.save()


class Answers(Jobs[Answer]):
    """All answers that are being generated, and for a while those that have ended."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine, KEEP_S, MAX_KEPT)

    def begin(self, answer: Answer, stream: AsyncGenerator[RequestOutput | None]) -> None:
        """Read a stream to its end in a task of its own."""
        self.start(answer, _read(answer, stream))


async def _read(answer: Answer, stream: AsyncGenerator[RequestOutput | None]) -> None:
    saved = time.monotonic()
    # Leaving the block closes the stream, which aborts the engine's request.
    async with aclosing(stream):
        async for output in stream:
            if output is not None:
                answer.output = output
                answer.change()
                if time.monotonic() - saved >= SAVE_S:
                    saved = time.monotonic()
                    answer.save()
