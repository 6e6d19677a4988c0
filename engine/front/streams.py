"""OutputStream: holds the output of one request until its reader takes it.

The engine adds tokens and never waits; a slow reader gets them merged. A stream therefore needs memory for its own
output only. ReaderPacing wakes readers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from operator import attrgetter

import numpy as np

from engine.errors import EngineError
from engine.front.completion import Completion
from engine.input.tokenizer import Tokenizer
from engine.messages import AddRequest, Detail
from engine.metrics import Metrics
from engine.outputs import GrammarInfo, RequestMetrics, RequestOutput, TokenLogprobs

_has_news = attrgetter("has_news")
MAX_DECODED = 4096  # tokens of a completion that are decoded at a time: 0.5 ms


class OutputStream:
    """The n completions of a request, for one reader."""

    def __init__(
        self, message: AddRequest, prompt: str | None, arrival_time: float, tokenizer: Tokenizer | None,
        metrics: Metrics,
    ) -> None:
        params, self._prompt_token_ids = message.params, message.prompt_token_ids
        self.request_id = message.request_id
        self.completions = [
            Completion(index, each, params, self._prompt_token_ids, tokenizer)
            for index, each in enumerate(message.completions)
        ]
        self.grammar: GrammarInfo | None = None
        self.is_final = params.output_kind == "final"  # the reader wants only the last output
        self.times = RequestMetrics(arrival_time)
        self.num_unfinished = params.n
        self._is_delta = params.output_kind == "delta"
        self._prompt = prompt
        self._params = params
        self._metrics = metrics
        self._prompt_logprobs: list[TokenLogprobs | None] = []  # received so far
        self._pooled: np.ndarray | None = None
        self._num_cached_tokens = 0
        self._failure: EngineError | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_finished(self) -> bool:
        return self.num_unfinished == 0

    def take(self, completion: Completion, detail: Detail, num_new: int, now: float) -> None:
        """Take what a step said about a completion beside its token ids, without waking the reader."""
        completion.take(detail, num_new)
        if detail.prompt_logprobs:
            if detail.prompt_logprobs[0] is None:  # the first position, also after a preemption
                self._prompt_logprobs = []
            self._prompt_logprobs += completion.name_tokens(detail.prompt_logprobs)
        if detail.pooled is not None:
            self._pooled = detail.pooled
        times = self.times
        if detail.queue_time_s is not None:
            if completion.index == 0:  # the other completions find the blocks that the first one computed
                self._num_cached_tokens = max(self._num_cached_tokens, detail.num_cached_tokens)
            times.num_preemptions = max(times.num_preemptions, detail.num_preemptions)
            for source, counts in detail.drafts.items():
                before = times.drafts.get(source, (0, 0))
                times.drafts[source] = (before[0] + counts[0], before[1] + counts[1])
        if num_new and times.first_token_time is None:
            times.first_token_time = now
            self._metrics.ttft.observe(now - times.arrival_time)
            if detail.queue_time_s is not None:
                times.first_scheduled_time = times.arrival_time + detail.queue_time_s
                self._metrics.queue_time.observe(detail.queue_time_s)

    def note_end(self, completion: Completion) -> None:
        """Count a completion that has ended, without waking the reader."""
        assert completion.finish_reason is not None
        if self._failure is None:
            self.num_unfinished -= 1
        self._metrics.finished[completion.finish_reason] += 1
        self._metrics.e2e.observe(time.monotonic() - self.times.arrival_time)
        self._metrics.num_output_tokens.observe(len(completion.token_ids))
        if self.num_unfinished == 0:
            self._metrics.num_prompt_tokens.observe(len(self._prompt_token_ids))
            self._metrics.prompt_tokens_cached += self._num_cached_tokens
            self._metrics.observe_end(self.times, self.count_tokens(), self._params)

    def count_tokens(self) -> list[int]:
        return [len(each.token_ids) for each in self.completions]

    def wake(self) -> None:
        """Let the reader look for output."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def fail(self, error: EngineError) -> None:
        """End the stream with an error that `get` raises. A finished stream is left unchanged."""
        if not self.is_finished:
            self._failure = error
            self.num_unfinished = 0
            self.wake()

    async def get(self) -> RequestOutput:
        """Wait for new output. Returns the output since the last call (delta), or all of it (cumulative, final).

        Raises:
            EngineError: the error passed to `fail`.
        """
        while not self._has_news():
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        for completion in self.completions:
            while len(completion.token_ids) - completion.num_decoded > MAX_DECODED and not completion.has_stops:
                completion.decode(MAX_DECODED)
                await asyncio.sleep(0)
        if self._failure is not None:
            raise self._failure
        listed = self.completions
        if self._is_delta:
            listed = [each for each in listed if each.has_news]
        outputs, times = [each.make_output(self._is_delta) for each in listed], self.times
        is_scored = len(self._prompt_logprobs) == len(self._prompt_token_ids)
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=outputs,
            finished=self.num_unfinished == 0,
            num_cached_tokens=self._num_cached_tokens,
            prompt_logprobs=self._prompt_logprobs if is_scored else None,
            metrics=RequestMetrics(
                *(times.arrival_time, times.first_scheduled_time, times.first_token_time),
                *(times.last_token_time, times.num_preemptions, times.drafts),
            ),
            grammar=self.grammar,
            pooled=self._pooled,
        )

    def _has_news(self) -> bool:
        # After a failure, none is unfinished.
        return self.num_unfinished == 0 or (not self.is_final and any(map(_has_news, self.completions)))


class ReaderPacing:
    """Wakes readers in rounds that take at most half of the event loop's time.

    Waking hundreds of readers occupies the loop for milliseconds: each decodes text and writes to a socket. After a
    round, the next one waits as long as the last one took; meanwhile tokens add up.
    """

    def __init__(self) -> None:
        self._pending: list[Sequence[OutputStream]] = []  # to be woken in the next round
        self._start = 0.0  # of the current round
        self._is_busy = False  # during a round and the wait after it

    def wake(self, readers: Sequence[OutputStream]) -> None:
        """Wake these readers in the next round, which starts now if none is in progress."""
        if not self._pending or self._pending[-1] is not readers:
            self._pending.append(readers)
        if not self._is_busy:
            self._begin_round()

    def _begin_round(self) -> None:
        self._is_busy = bool(self._pending)
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        self._start = time.monotonic()
        for readers in pending:
            for reader in readers:
                reader.wake()
        # The loop runs callbacks in order, so this one follows the readers.
        asyncio.get_running_loop().call_soon(self._end_round)

    def _end_round(self) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(time.monotonic() - self._start, self._begin_round)
