"""DetokenizerActor: turns new tokens into text and puts it into each request's stream."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import accumulate
from typing import assert_never

from engine.actors.actor import Actor
from engine.actors.reader_pacing import ReaderPacing
from engine.core.detokenizer import Detokenizer
from engine.core.text_group import TextGroup
from engine.messages import AbortRequest, AddRequest, Detail, DetokenizerInbox, NewTokens
from engine.metrics import Metrics
from engine.output_stream import OutputStream, StreamGroup


class DetokenizerActor(Actor[DetokenizerInbox]):
    """Owns the Detokenizer.

    Args:
        streams: handle -> (stream, index of the completion); finished completions are removed.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        streams: dict[int, tuple[OutputStream, int]],
        metrics: Metrics,
        send_abort: Callable[[AbortRequest], None],
    ) -> None:
        super().__init__()
        self._detokenizer = detokenizer
        self._streams = streams
        self._metrics = metrics
        self._send_abort = send_abort
        self._pacing = ReaderPacing()
        self._rows: dict[int, _Rows] = {}  # by source

    def handle(self, message: DetokenizerInbox) -> None:
        match message:
            case NewTokens():
                self._process(message)
            case AddRequest(params=params, prompt_token_ids=prompt):
                for each in message.completions:
                    self._detokenizer.add(each.handle, params, prompt, each.generated_token_ids)
            case _:
                assert_never(message)

    def forget(self, source: int) -> None:
        """Process what a replica has sent, because others continue its completions."""
        while self._inbox:
            self.handle(self._inbox.popleft())
        if (rows := self._rows.pop(source, None)) is not None:
            rows.streams.flush()

    def _process(self, message: NewTokens) -> None:
        now = time.monotonic()
        details = {detail.handle: detail for detail in message.details}
        readers: list[OutputStream] = []
        others: list[tuple[int, list[int]]] = []
        if message.handles:
            rows = self._find_rows(message, details)
            readers = rows.streams.awaited
            others = self._put_rows(rows, message, now)
        elif details and message.source in self._rows:
            self._rows[message.source].streams.flush()
        takes = [(handle, ids, details.pop(handle, None)) for handle, ids in others]
        takes += [(handle, [], detail) for handle, detail in details.items()]
        streams = [self._take(*take, now, message.source) for take in takes]
        news = [stream for stream in streams if stream is not None and stream.has_news]
        if readers or news:
            self._pacing.wake([*readers, *news] if news else readers)

    def _find_rows(self, message: NewTokens, details: dict[int, Detail]) -> _Rows:
        """Return texts and streams of the handles; those of the last step if nothing has changed."""
        rows, has_many = self._rows.get(message.source), bool(message.counts)
        separate = set(message.handles) if has_many else details.keys()
        if rows is None or rows.handles is not message.handles or rows.separate != separate:
            if rows is not None:
                rows.streams.flush()
            rows = _Rows(message.handles, set(separate), self._detokenizer, self._streams)
            self._rows[message.source] = rows
        return rows

    def _put_rows(self, rows: _Rows, message: NewTokens, now: float) -> list[tuple[int, list[int]]]:
        """Process the tokens of the grouped rows. Returns (handle, token ids) of the other rows."""
        handles, token_ids = message.handles, message.token_ids
        if message.counts:
            ends = accumulate(message.counts)
            each = zip(handles, message.counts, ends, strict=True)
            return [(handle, token_ids[end - count : end]) for handle, count, end in each]
        plain = [token_ids[index] for index in rows.indices] if rows.others else token_ids
        if plain:
            rows.streams.put(plain, rows.texts.feed(plain), now, self._metrics.itl)
            self._metrics.generation_tokens += len(plain)
        return [(handles[index], [token_ids[index]]) for index in rows.others]

    def _take(
        self, handle: int, token_ids: list[int], detail: Detail | None, now: float, source: int
    ) -> OutputStream | None:
        """Process the output of one completion. Returns its stream, or None if it has ended."""
        delta = self._detokenizer.process(handle, token_ids, detail)
        if delta is None:
            return None  # output after a stop string is dropped
        if delta.stopped_by_string:
            self._send_abort(AbortRequest([handle], "stop"))
        if handle not in self._streams:
            return None  # the stream was closed or failed
        stream, index = self._streams[handle]
        if delta.finish_reason is not None:
            del self._streams[handle]
            if source in self._rows:
                self._rows[source].handles = []  # they may include this completion
        self._metrics.generation_tokens += len(delta.token_ids)
        if gap := stream.put(index, delta, detail, now):
            self._metrics.itl.observe(gap)
        return stream


class _Rows:
    """Texts and streams of a step's handles, looked up once while the batch stays the same.

    Args:
        separate: handles that are processed one by one, because they have a Detail or got several tokens.
    """

    def __init__(
        self,
        handles: list[int],
        separate: set[int],
        detokenizer: Detokenizer,
        streams: dict[int, tuple[OutputStream, int]],
    ) -> None:
        self.handles = handles
        self.separate = separate
        known = streams.keys() - separate
        texts = [detokenizer.find_text(handle) if handle in known else None for handle in handles]
        self.indices = [index for index, text in enumerate(texts) if text is not None]
        # Completions with stop strings, separate ones, and ended ones.
        self.others = [index for index, text in enumerate(texts) if text is None]
        self.texts = TextGroup([text for text in texts if text is not None])
        self.streams = StreamGroup([streams[handles[index]] for index in self.indices])
