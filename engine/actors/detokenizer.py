"""DetokenizerActor: turns new tokens into text and puts it into each request's own stream."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import assert_never

from engine.actors.actor import Actor
from engine.core.detokenizer import Detokenizer
from engine.messages import AbortRequest, AddRequest, DetokenizerInbox, NewTokens, RequestTokens
from engine.metrics import Metrics
from engine.output_stream import OutputStream


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
        gaps: list[float] = []
        num_plain = 0
        feed, streams = self._detokenizer.feed, self._streams
        for request_id, token_id in message.plain:
            text = feed(request_id, token_id)
            if text is None:
                self._process_item(RequestTokens(request_id, [token_id]), now, gaps)
            else:
                stream, index = streams[request_id]
                gaps.append(stream.put_token(index, token_id, text, now))
                num_plain += 1
        self._metrics.generation_tokens += num_plain
        for item in message.items:
            self._process_item(item, now, gaps)
        self._metrics.itl.observe_many(gaps)

    def _process_item(self, item: RequestTokens, now: float, gaps: list[float]) -> None:
        delta = self._detokenizer.process(item)
        if delta is None:
            return  # it has ended: what comes after a stop string is dropped
        if delta.stopped_by_string:
            self._tell_scheduler(AbortRequest((item.request_id,), "stop"))
        stream, index = self._streams[item.request_id]
        if delta.finish_reason is not None:
            del self._streams[item.request_id]
        self._metrics.generation_tokens += len(delta.token_ids)
        if gap := stream.put(index, item, delta, now):
            gaps.append(gap)
