"""OutputStream: holds the output of one request until its reader takes it.

The engine adds deltas and never waits; a slow reader gets them merged. A stream therefore needs memory for its own
text only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from engine.core.detokenizer import TextDelta
from engine.errors import EngineError
from engine.messages import Detail
from engine.metrics import Histogram, Metrics
from engine.outputs import (
    CompletionOutput,
    FinishReason,
    GrammarInfo,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
)
from engine.sampling_params import SamplingParams

BUNDLE_STEPS = 64  # steps that a StreamGroup without waiting readers buffers


class _Completion:
    """Output of one of the n completions; in delta mode, since the last delta."""

    __slots__ = (
        "cumulative_logprob", "error", "finish_reason", "logprobs", "stop_reason", "text_parts", "token_ids",
    )  # fmt: skip

    def __init__(self, wants_logprobs: bool) -> None:
        self.text_parts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = [] if wants_logprobs else None
        self.cumulative_logprob = 0.0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None


class OutputStream:
    """Merges the deltas of a request's n completions for one reader."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        arrival_time: float,
        metrics: Metrics,
    ) -> None:
        self.request_id = request_id
        self.handles: list[int] = []  # one per completion
        self.grammar: GrammarInfo | None = None
        self.num_unfinished = params.n
        self._prompt = prompt
        self._prompt_token_ids = prompt_token_ids
        self._kind = params.output_kind
        self._arrival_time = arrival_time
        self._metrics = metrics
        self._completions = [_Completion(params.logprobs is not None) for _ in range(params.n)]
        self._prompt_logprobs: list[TokenLogprobs | None] = []  # received so far
        self._pooled: np.ndarray | None = None
        self._num_cached_tokens = 0
        self._num_preemptions = 0
        self._drafts: dict[str, tuple[int, int]] = {}  # source -> (drafted tokens, accepted ones)
        self._first_scheduled_time: float | None = None
        self._first_token_time: float | None = None
        self._last_token_time: float | None = None
        self._read_token_time: float | None = None  # _last_token_time at the last `get`
        self.has_news = False  # `put` added output for which the reader has not been woken
        self._failure: EngineError | None = None
        self._is_new = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_finished(self) -> bool:
        return self.num_unfinished == 0

    def put(self, index: int, delta: TextDelta, detail: Detail | None, now: float) -> float:
        """Add a delta without waking the reader; `wake` does that.

        Args:
            detail: the core's Detail behind the delta: cached tokens, queue time, preemptions.

        Returns the seconds since the stream's last token; 0 if there is no token, or no earlier one.
        """
        completion = self._completions[index]
        gap = 0.0
        if delta.token_ids:
            gap = self._note_tokens(completion, delta, detail, now)
        if delta.text:
            completion.text_parts.append(delta.text)
        if delta.prompt_logprobs:
            if delta.prompt_logprobs[0] is None:  # the first position, also after a preemption
                self._prompt_logprobs = []
            self._prompt_logprobs += delta.prompt_logprobs
        if detail is not None and detail.pooled is not None:
            self._pooled = detail.pooled
        if detail is not None and detail.queue_time_s is not None:
            if index == 0:  # the other completions find the blocks that the first one computed
                self._num_cached_tokens = max(self._num_cached_tokens, detail.num_cached_tokens)
            self._num_preemptions = max(self._num_preemptions, detail.num_preemptions)
            for source, (num_drafted, num_accepted) in detail.drafts.items():
                before = self._drafts.get(source, (0, 0))
                self._drafts[source] = (before[0] + num_drafted, before[1] + num_accepted)
        if delta.finish_reason is not None:
            completion.finish_reason = delta.finish_reason
            completion.stop_reason = delta.stop_reason
            completion.error = delta.error
            if self._failure is None:
                self.num_unfinished -= 1
            self._metrics.finished[delta.finish_reason] += 1
            self._metrics.e2e.observe(now - self._arrival_time)
        is_news = bool(delta.token_ids or delta.text or delta.finish_reason)
        if is_news and (self._kind != "final" or self.num_unfinished == 0):
            self.has_news = True
        return gap

    def wake(self) -> None:
        """Wake the reader if `put` or a StreamGroup added output."""
        if self.has_news or self._read_token_time != self._last_token_time:
            self._wake()

    def fail(self, error: EngineError) -> None:
        """End the stream with an error that `get` raises. A finished stream is left unchanged."""
        if self.is_finished:
            return
        self._failure = error
        self.num_unfinished = 0
        self._wake()

    async def get(self) -> RequestOutput:
        """Wait for new output. Returns the output since the last call (delta), or all of it (cumulative, final).

        Raises:
            EngineError: the error passed to `fail`.
        """
        while not self._is_new:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._is_new = self.has_news = False
        self._read_token_time = self._last_token_time
        if self._failure is not None:
            raise self._failure
        outputs = [self._make_output(index, completion) for index, completion in enumerate(self._completions)]
        if self._kind == "delta":
            outputs = [
                output for output in outputs if output.token_ids or output.text or output.finish_reason
            ]
            self._clear_finish_reasons()
        is_scored = len(self._prompt_logprobs) == len(self._prompt_token_ids)
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=outputs,
            finished=self.is_finished,
            num_cached_tokens=self._num_cached_tokens,
            prompt_logprobs=self._prompt_logprobs if is_scored else None,
            metrics=self._make_metrics(),
            grammar=self.grammar,
            pooled=self._pooled,
        )

    def _wake(self) -> None:
        self._is_new = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _note_tokens(
        self, completion: _Completion, delta: TextDelta, detail: Detail | None, now: float
    ) -> float:
        completion.token_ids += delta.token_ids
        if delta.logprobs and completion.logprobs is not None:
            completion.logprobs += delta.logprobs
            completion.cumulative_logprob += sum(entry.token.logprob for entry in delta.logprobs)
        last, self._last_token_time = self._last_token_time, now
        if last is None:
            self._first_token_time = now
            self._metrics.ttft.observe(now - self._arrival_time)
            if detail is not None and detail.queue_time_s is not None:
                self._first_scheduled_time = self._arrival_time + detail.queue_time_s
                self._metrics.queue_time.observe(detail.queue_time_s)
            return 0.0
        return now - last

    def _make_output(self, index: int, completion: _Completion) -> CompletionOutput:
        text = "".join(completion.text_parts)
        token_ids = completion.token_ids[:]
        logprobs = None if completion.logprobs is None else completion.logprobs[:]
        completion.text_parts.clear()
        if self._kind != "delta":
            completion.text_parts.append(text)
        else:
            completion.token_ids.clear()
            if completion.logprobs is not None:
                completion.logprobs.clear()
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=token_ids,
            logprobs=logprobs,
            cumulative_logprob=None if completion.logprobs is None else completion.cumulative_logprob,
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
            error=completion.error,
        )

    def _clear_finish_reasons(self) -> None:
        """Delta mode reports each finish once."""
        for completion in self._completions:
            completion.finish_reason = None

    def _make_metrics(self) -> RequestMetrics:
        return RequestMetrics(
            arrival_time=self._arrival_time,
            first_scheduled_time=self._first_scheduled_time,
            first_token_time=self._first_token_time,
            last_token_time=self._last_token_time,
            num_preemptions=self._num_preemptions,
            drafts=self._drafts,
        )


class StreamGroup:
    """Unfinished completions that each get one token per step.

    While no reader waits, tokens are buffered for BUNDLE_STEPS steps, and a step costs two list appends. Flush the
    group before a member gets output by another way, and before the group is dropped.
    """

    def __init__(self, members: Sequence[tuple[OutputStream, int]]) -> None:
        self._streams = [stream for stream, _ in members]
        # Streams whose readers are to be woken after `put`.
        self.awaited = [stream for stream in self._streams if stream._kind != "final"]
        # With readers a bundle is one step and a member gets one token; without, it gets a tuple of tokens.
        self._bundle_steps, verb = (1, "append") if self.awaited else (BUNDLE_STEPS, "extend")
        completions = [stream._completions[index] for stream, index in members]
        self._add_tokens = [getattr(completion.token_ids, verb) for completion in completions]
        self._add_texts = [getattr(completion.text_parts, verb) for completion in completions]
        self._token_ids: list[Sequence[int]] = []  # per step since the last flush
        self._texts: list[Sequence[str]] = []
        self._last_time: float | None = None  # time of the group's last tokens

    def put(self, token_ids: Sequence[int], texts: Sequence[str], now: float, gaps: Histogram) -> None:
        """Add one token per member, and record the seconds since the previous ones in `gaps`."""
        self._token_ids.append(token_ids)
        self._texts.append(texts)
        if self._last_time is None:
            gaps.observe_many([now - (stream._last_token_time or now) for stream in self._streams])
        else:
            gaps.observe(now - self._last_time, len(self._streams))
        self._last_time = now
        if len(self._token_ids) == self._bundle_steps:
            self.flush()

    def flush(self) -> None:
        """Pass the buffered tokens to the members."""
        if not self._token_ids:
            return
        for adders, steps in ((self._add_tokens, self._token_ids), (self._add_texts, self._texts)):
            news: Iterable[Any] = steps[0] if self.awaited else zip(*steps, strict=True)
            for add, new in zip(adders, news, strict=True):
                add(new)
            steps.clear()
        for stream in self._streams:
            stream._last_token_time = self._last_time
