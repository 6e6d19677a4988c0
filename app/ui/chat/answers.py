"""Answers of the chat, which the server writes to their end whether or not a page shows them.

Answers.start ──▶ a task changes the Answer, and saves it at once, each second and at the end ◀── pages watch it
A page that is reloaded finds the tokens of an answer by its id for ten minutes.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from app.concurrency import cancel_all
from app.reasoning import Thinking, write_output
from app.ui.chat.conversation import Written
from app.ui.explain import EXPLAINED, Explanation, explain, explain_bug
from app.ui.pacing import HEARTBEAT_S
from engine import Engine, RequestOutput

logger = logging.getLogger("troupe.ui")

KEEP_S = 600.0
MAX_KEPT = 512  # answers that have ended
SAVE_S = 1.0
WAITING = "…"
# An answer loops when it ends in four copies of at most so many characters, and at least so many characters are copies.
MAX_PERIOD, NUM_COPIES, MIN_LOOP_CHARS = 400, 4, 60
PERIODS = range(1, MAX_PERIOD + 1)
Outputs = Mapping[str, RequestOutput]


@dataclass(frozen=True, slots=True)
class Start:
    """What a model goes on with: a prompt, what it has generated after it, and the text of that.

    Attributes:
        thinking: how the output after the prompt begins; None if it contains no reasoning.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    thinking: Thinking | None


@dataclass(slots=True, eq=False, kw_only=True)
class Answer:
    """One answer, as far as it has been generated.

    Attributes:
        names: the models that answer.
        before: by model, the reasoning and the content that its answer goes on with, as the store has them.
        starts: by model, what it goes on with, as it was generated; unless that is known, it is made of `before`.
        outputs: by model, what it has written so far; its text begins with that of its start.
        waits_for: what is shown before the first token.
        thinking: by model, how its text is split into reasoning and content; None if all of it is content.
        write: begins to write the answer into the store; `written` is the last writing.
        ended: when it ended, by the clock of Answers.
    """

    answer_id: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    names: Sequence[str] = ("",)
    before: Mapping[str, Written] = field(default_factory=dict)
    starts: dict[str, Start] = field(default_factory=dict)
    outputs: Mapping[str, RequestOutput] = field(default_factory=dict)
    waits_for: str = WAITING
    thinking: dict[str, Thinking | None] = field(default_factory=dict)
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

    def read(self, name: str) -> str:
        """Return the output of a model so far."""
        if name in self.outputs:
            return self.outputs[name].outputs[0].text
        if name in self.starts:
            return self.starts[name].text
        return write_output(*self.before.get(name, ("", "")), self.thinking.get(name))

    def make_starts(self) -> dict[str, Start]:
        """Return what another answer needs to go on exactly where this one has ended."""
        starts = {}
        for name, output in self.outputs.items():
            start, written = self.starts[name], output.outputs[0]
            # The engine decodes the end again: what may become a stop string, and a part of a character.
            text = written.text if written.finish_reason is None else written.text.rstrip("\ufffd")
            starts[name] = replace(start, token_ids=[*start.token_ids, *written.token_ids], text=text)
        return starts

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

    async def rest(self, seconds: float) -> None:
        """Wait so long, or until the answer ends."""
        if seconds and self._task is not None:
            await asyncio.wait({self._task}, timeout=seconds)

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

    def begin(self, answer: Answer, stream: AsyncGenerator[Outputs | None]) -> None:
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

    async def _read(self, answer: Answer, stream: AsyncGenerator[Outputs | None]) -> None:
        saved = -SAVE_S  # the first text is saved at once
        try:
            # Leaving the block closes the stream, which aborts the engine's request.
            async with aclosing(stream):
                async for outputs in stream:
                    if outputs is not None:
                        answer.outputs = outputs
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


async def join_streams(streams: Mapping[str, AsyncGenerator[RequestOutput]]) -> AsyncGenerator[Outputs]:
    """Yield all answers so far under their names whenever one grows; closing this closes the streams."""
    latest: dict[str, RequestOutput] = {}
    reads = {asyncio.ensure_future(anext(stream)): name for name, stream in streams.items()}
    try:
        while reads:
            done, _ = await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
            for read in done:
                name = reads.pop(read)
                with suppress(StopAsyncIteration):
                    latest[name] = read.result()
                    reads[asyncio.ensure_future(anext(streams[name]))] = name
            yield dict(latest)
    finally:
        await cancel_all(reads)
        for stream in streams.values():
            await stream.aclose()


def is_looping(text: str) -> bool:
    """Return whether the text ends in copies of the same words."""
    return any(_ends_in_copies(text.rstrip(), period) for period in PERIODS)


def _ends_in_copies(text: str, period: int) -> bool:
    size = max(period * NUM_COPIES, MIN_LOOP_CHARS)
    end = text[-size:]
    return len(end) == size and end[period:] == end[:-period]
