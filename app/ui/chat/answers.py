"""Answers of the chat, which the server writes to their end whether or not a page shows them.

Answers.start ──▶ a task changes the Answer, and saves it once a second and at the end ◀── pages watch it
A page that is reloaded finds the tokens of an answer by its id for ten minutes.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from app.concurrency import cancel_all
from app.reasoning import Thinking
from app.ui.explain import EXPLAINED, Explanation, explain, explain_bug
from app.ui.pacing import HEARTBEAT_S
from engine import Engine, RequestOutput

logger = logging.getLogger("troupe.ui")

KEEP_S = 600.0
MAX_KEPT = 512  # answers that have ended
SAVE_S = 1.0
# An answer loops when it ends in four copies of at most so many characters, and at least so many characters are copies.
MAX_PERIOD, NUM_COPIES, MIN_LOOP_CHARS = 400, 4, 60
PERIODS = range(1, MAX_PERIOD + 1)
HEADING = re.compile(r"\n\n\*\*[^*\n]+\*\*\n\n")


@dataclass(slots=True, eq=False, kw_only=True)
class Answer:
    """One answer, as far as it has been generated.

    Attributes:
        before: the text that the answer goes on with; the output has what follows it.
        thinking: how the text is split into reasoning and content; None if all of it is content.
        write: begins to write the answer into the store; `written` is the last writing.
        ended: when it ended, by the clock of Answers.
    """

    answer_id: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    before: str = ""
    output: RequestOutput | None = None
    thinking: Thinking | None = None
    problem: Explanation | None = None
    write: Callable[[], Future[Any]] | None = None
    written: Future[Any] | None = None
    ended: float | None = None
    _task: asyncio.Task[None] | None = None
    _num_changes: int = 0
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_over(self) -> bool:
        return self.ended is not None

    def stop(self) -> None:
        """End the answer and abort its requests; the text so far stays."""
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

    def save(self) -> None:
        """Write the answer into the store."""
        if self.write is not None:
            self.written = self.write()

    def change(self) -> None:
        """Report a change to those who watch."""
        self._num_changes += 1
        news, self._news = self._news, asyncio.Event()
        news.set()


class Answers:
    """All answers that are being generated, and for a while those that have ended."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self._kept: dict[str, Answer] = {}

    def begin(self, answer: Answer, stream: AsyncGenerator[RequestOutput | None]) -> None:
        self._kept[answer.answer_id] = answer
        self._drop_old()
        answer._task = asyncio.create_task(self._read(answer, stream))
        answer._task.add_done_callback(lambda task: self._end(answer, task))

    def find(self, answer_id: str) -> Answer | None:
        """Return the answer with this id; None if it has expired or the server was restarted."""
        self._drop_old()
        return self._kept.get(answer_id)

    def _drop_old(self) -> None:
        # A copy, because Gradio calls handlers without await in other threads.
        ended = [answer for answer in list(self._kept.values()) if answer.ended is not None]
        oldest = self._clock() - KEEP_S
        for number, answer in enumerate(sorted(ended, key=lambda answer: -(answer.ended or 0))):
            if number >= MAX_KEPT or (answer.ended or 0) < oldest:
                self._kept.pop(answer.answer_id, None)

    async def _read(self, answer: Answer, stream: AsyncGenerator[RequestOutput | None]) -> None:
        saved = time.monotonic()
        try:
            # Leaving the block closes the stream, which aborts the engine's request.
            async with aclosing(stream):
                async for output in stream:
                    if output is not None:
                        answer.output = output
                        answer.change()
                        if time.monotonic() - saved >= SAVE_S:
                            saved = time.monotonic()
                            answer.save()
        except EXPLAINED as error:
            answer.problem = explain(error, self._engine.state)

    def _end(self, answer: Answer, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("an answer of the chat failed", exc_info=error)
            answer.problem = explain_bug(error)
        answer.ended = self._clock()
        answer.save()
        answer.change()


async def join_streams(streams: Mapping[str, AsyncGenerator[RequestOutput]]) -> AsyncGenerator[RequestOutput]:
    """Yield all answers so far under their names whenever one grows; closing this closes the streams."""
    latest: dict[str, RequestOutput] = {}
    reads = {asyncio.ensure_future(anext(stream)): name for name, stream in streams.items()}
    try:
        while reads:
            done, _ = await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
            for read in done:
                name = reads.pop(read)
                latest[name] = read.result()
                if not latest[name].finished:
                    reads[asyncio.ensure_future(anext(streams[name]))] = name
            yield join_outputs({name: latest[name] for name in streams if name in latest}, is_over=not reads)
    finally:
        await cancel_all(reads)
        for stream in streams.values():
            await stream.aclose()


def join_outputs(outputs: Mapping[str, RequestOutput], is_over: bool) -> RequestOutput:
    """Return one output with the texts of all, and without token probabilities."""
    first = next(iter(outputs.values()))
    choices = {name: output.outputs[0] for name, output in outputs.items()}
    text = "\n\n".join(f"**{name}**\n\n{choice.text}" for name, choice in choices.items())
    token_ids = [token_id for choice in choices.values() for token_id in choice.token_ids]
    reasons = {choice.finish_reason for choice in choices.values()}
    reason = "length" if "length" in reasons else first.outputs[0].finish_reason
    whole = replace(
        first.outputs[0], text=text, token_ids=token_ids, logprobs=None, finish_reason=reason if is_over else None
    )
    return replace(first, outputs=[whole], finished=is_over)


def split_joined(text: str, names: Sequence[str]) -> dict[str, str]:
    """Return what each model wrote of a text that `join_outputs` made; of another text, all of it for each model."""
    heading = re.compile(rf"(?:\A|\n\n)\*\*({'|'.join(map(re.escape, names))})\*\*\n\n")
    start, *parts = heading.split(text)
    found = dict(zip(parts[::2], parts[1::2], strict=True))
    return {name: start if start else found.get(name, "") for name in names}


def is_looping(text: str) -> bool:
    """Return whether the text, or one model's part of it, ends in copies of the same words."""
    return any(_ends_in_copies(part.rstrip(), period) for part in HEADING.split(text) for period in PERIODS)


def _ends_in_copies(text: str, period: int) -> bool:
    size = max(period * NUM_COPIES, MIN_LOOP_CHARS)
    end = text[-size:]
    return len(end) == size and end[period:] == end[:-period]
