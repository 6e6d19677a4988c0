"""Answers of the chat. A page that was reloaded finds its answer until ten minutes after the end."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

from app.reasoning import Thinking
from app.ui.jobs import Job, Jobs
from engine import Engine, RequestOutput

KEEP_S = 600.0
MAX_KEPT = 512  # answers that have ended


@dataclass(slots=True, eq=False, kw_only=True)
class Answer(Job):
    """One answer, as far as it has been generated.

    Attributes:
        thinking: how the text is split into reasoning and content; None if all of it is content.
    """

    output: RequestOutput | None = None
    thinking: Thinking | None = None


class Answers(Jobs[Answer]):
    """All answers that are being generated, and for a while those that have ended."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine, KEEP_S, MAX_KEPT)

    def begin(self, make_stream: Callable[[Answer], AsyncGenerator[RequestOutput | None]]) -> Answer:
        """Read a stream to its end in a task of its own."""
        answer = Answer()
        self.start(answer, _read(answer, make_stream(answer)))
        return answer


async def _read(answer: Answer, stream: AsyncGenerator[RequestOutput | None]) -> None:
    # Leaving the block closes the stream, which aborts the engine's request.
    async with aclosing(stream):
        async for output in stream:
            if output is not None:
                answer.output = output
                answer.change()
