"""DetokenizerActor: turns new tokens into text and puts it into each request's own stream."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import assert_never

from engine.actors.actor import Actor
from engine.actors.reader_pacing import ReaderPacing
from engine.core.detokenizer import Detokenizer
from engine.core.text_group import TextGroup
from engine.messages import AbortRequest, AddRequest, DetokenizerInbox, NewTokens, RequestTokens
from engine.metrics import Metrics
from engine.output_stream import OutputStream, StreamGroup


class DetokenizerActor(Actor[DetokenizerInbox]):
    """The only owner of the Detokenizer. `streams` maps request ids to (stream, index of the completion)."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        streams: dict[str, tuple[OutputStream, int]],
        metrics: Metrics,
        tell_scheduler: Callable[[AbortRequest], None],
    ) -> None:
        super().__init__()
        self._detokenizer = detokenizer
        self._streams = streams
        self._metrics = metrics
        self._tell_scheduler = tell_scheduler
        self._pacing = ReaderPacing()
        self._rows: _PlainRows | None = None

    def handle(self, message: DetokenizerInbox) -> None:
        match message:
            case NewTokens():
                self._process(message)
            case AddRequest():
                self._detokenizer.add(message.request_id, message.params, message.prompt_token_ids)
            case _:
                assert_never(message)

    def _process(self, message: NewTokens) -> None:
        now = time.monotonic()
        readers: list[OutputStream] = []
        others: list[RequestTokens] = []
        if message.plain_ids:
            readers, others = self._process_plain(message.plain_ids, message.plain_tokens, now)
        if message.items and self._rows is not None:
            self._rows.streams.flush()
        streams = [self._process_item(item, now) for item in (*others, *message.items)]
        news = [stream for stream in streams if stream is not None and stream.has_news]
        if readers or news:
            self._pacing.wake([*readers, *news] if news else readers)

    def _process_plain(
        self, request_ids: list[str], token_ids: list[int], now: float
    ) -> tuple[list[OutputStream], list[RequestTokens]]:
        """Take the tokens of most rows; returns their readers, and the items of the rows that need more care."""
        rows = self._rows
        if rows is None or rows.request_ids is not request_ids:
            self._drop_rows()
            rows = self._rows = _PlainRows(request_ids, self._detokenizer, self._streams)
        plain = [token_ids[index] for index in rows.indices] if rows.others else token_ids
        rows.streams.put(plain, rows.texts.feed(plain), now, self._metrics.itl)
        self._metrics.generation_tokens += len(plain)
        others = [RequestTokens(request_ids[index], [token_ids[index]]) for index in rows.others]
        return rows.streams.awaited, others

    def _drop_rows(self) -> None:
        if self._rows is not None:
            self._rows.streams.flush()
            self._rows = None

    def _process_item(self, item: RequestTokens, now: float) -> OutputStream | None:
        """Take what one request got; returns its stream, None when the request has ended."""
        delta = self._detokenizer.process(item)
        if delta is None:
            return None  # what comes after a stop string is dropped
        if delta.stopped_by_string:
            self._tell_scheduler(AbortRequest((item.request_id,), "stop"))
        stream, index = self._streams[item.request_id]
        if delta.finish_reason is not None:
            del self._streams[item.request_id]
            self._drop_rows()
        self._metrics.generation_tokens += len(delta.token_ids)
        if gap := stream.put(index, item, delta, now):
            self._metrics.itl.observe(gap)
        return stream


class _PlainRows:
    """What is behind the plain rows of a step, looked up once for as long as the batch stays the same."""

    def __init__(
        self, request_ids: list[str], detokenizer: Detokenizer, streams: dict[str, tuple[OutputStream, int]]
    ) -> None:
        self.request_ids = request_ids
        texts = [detokenizer.find_text(name) for name in request_ids]
        self.indices = [index for index, text in enumerate(texts) if text is not None]
        # Those with stop strings, and those that have ended.
        self.others = [index for index, text in enumerate(texts) if text is None]
        self.texts = TextGroup([text for text in texts if text is not None])
        self.streams = StreamGroup([streams[request_ids[index]] for index in self.indices])
