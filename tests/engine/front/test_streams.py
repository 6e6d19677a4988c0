"""OutputStream: tokens merge while nobody reads, every kind of output, and exactly one end.

ReaderPacing: nobody waits without need, nobody is forgotten, and a round that takes long is followed by a rest.
"""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from engine import EngineDead, Logprob, RequestOutput, RequestTimeout, SamplingParams, TokenLogprobs
from engine.front.completion import NoText
from engine.front.streams import OutputStream, ReaderPacing
from engine.messages import AddRequest, Detail, NewCompletion
from engine.metrics import Metrics
from engine.outputs import FinishReason
from tests.waiting import wait_until


class Letters(NoText):
    """Token 1 is "a"."""

    def feed(self, token_ids: Any) -> str:
        return "".join(chr(96 + token_id) for token_id in token_ids)


TOKENIZER: Any = SimpleNamespace(
    eos_token_ids=(0,), make_text=lambda *_: Letters(), token_piece=lambda token_id: chr(96 + token_id)
)


def make_stream(kind: str = "delta", metrics: Metrics | None = None, **params: object) -> OutputStream:
    sampling = SamplingParams(output_kind=kind, **params)  # type: ignore[arg-type]
    completions = [NewCompletion(handle, 0) for handle in range(sampling.n)]
    message = AddRequest("r", [1, 2], sampling, completions)
    return OutputStream(message, "hello", 10.0, TOKENIZER, metrics or Metrics())


def put(
    stream: OutputStream,
    text: str,
    index: int = 0,
    finish: FinishReason | None = None,
    logprobs: list[TokenLogprobs] | None = None,
    now: float = 11.0,
    queued: float | None = None,
) -> None:
    """What the client does for one completion in one step."""
    completion = stream.completions[index]
    completion.token_ids += [ord(char) - 96 for char in text]
    detail = Detail(
        index, logprobs, finish_reason=finish, queue_time_s=queued, num_cached_tokens=16, stop_reason=None
    )
    stream.take(completion, detail, len(text), now)
    stream.times.last_token_time = now
    if finish is not None:
        stream.note_end(completion)
    stream.wake()


async def is_silent(stream: OutputStream) -> bool:
    """Whether a reader would have to wait."""
    try:
        await asyncio.wait_for(stream.get(), 0.01)
    except TimeoutError:
        return True
    return False


async def test_unread_deltas_merge_into_one_and_hold_only_what_is_new() -> None:
    """A reader may have been told by something else since its wake-up was put off."""
    stream = make_stream()
    put(stream, "a")
    put(stream, "bc")
    output = await stream.get()
    assert (output.outputs[0].text, output.outputs[0].token_ids, output.finished) == ("abc", [1, 2, 3], False)
    assert (output.outputs[0].logprobs, output.outputs[0].cumulative_logprob) == (None, None)
    stream.wake()
    assert await is_silent(stream)
    put(stream, "d", finish="stop")
    output = await stream.get()
    assert (output.outputs[0].text, output.finished, output.outputs[0].is_finished) == ("d", True, True)


async def test_n_completions_end_one_by_one() -> None:
    stream = make_stream("cumulative", n=2)
    put(stream, "a", index=0, finish="stop")
    output = await stream.get()
    assert [completion.finish_reason for completion in output.outputs] == ["stop", None]
    assert not output.finished
    put(stream, "b", index=1, finish="length")
    assert (await stream.get()).finished


async def test_a_final_output_comes_once_all_completions_have_ended() -> None:
    stream = make_stream("final", n=2)
    put(stream, "a", index=0)
    put(stream, "b", index=1, finish="stop")
    assert await is_silent(stream)
    put(stream, "c", index=0, finish="length")
    output = await stream.get()
    assert [(each.text, each.finish_reason) for each in output.outputs] == [("ac", "length"), ("b", "stop")]
    assert output.finished


async def test_deltas_name_only_completions_with_news_and_a_finish_once() -> None:
    stream, told = make_stream(n=3), []
    for index, finish in ((2, "stop"), (1, None), (1, "length")):
        put(stream, "a", index=index, finish=finish)  # type: ignore[arg-type]
        told += [(each.index, each.finish_reason) for each in (await stream.get()).outputs]
    assert told == [(2, "stop"), (1, None), (1, "length")]


async def test_logprobs_are_cut_like_the_tokens_and_summed_over_all() -> None:
    stream = make_stream(logprobs=0)
    for token_id in (1, 2):
        put(stream, "a", logprobs=[TokenLogprobs(Logprob(token_id, -0.5, 1))])
        completion = (await stream.get()).outputs[0]
        assert completion.logprobs is not None
        assert [entry.token.token_id for entry in completion.logprobs] == [token_id]
    assert completion.cumulative_logprob == -1.0


async def test_a_failure_wakes_a_reader_that_waits() -> None:
    stream = make_stream()
    reader = asyncio.create_task(stream.get())
    await asyncio.sleep(0)
    stream.fail(EngineDead("the engine crashed"))
    with pytest.raises(EngineDead, match="the engine crashed"):
        await reader
    assert stream.is_finished


async def test_a_stream_that_has_ended_keeps_its_end() -> None:
    """A deadline may pass while the finished output waits for a slow reader."""
    stream = make_stream("final")
    put(stream, "a", finish="stop")
    stream.fail(RequestTimeout("too late"))
    output = await stream.get()
    assert (output.finished, output.outputs[0].finish_reason) == (True, "stop")


async def test_what_comes_after_a_failure_does_not_revive_the_stream() -> None:
    stream = make_stream()
    stream.fail(RequestTimeout("the deadline passed"))
    stream.fail(EngineDead("the engine was closed"))
    put(stream, "a")
    put(stream, "", finish="abort")
    assert stream.is_finished
    with pytest.raises(RequestTimeout):
        await stream.get()


async def test_outputs_tell_request_prompt_and_times() -> None:
    metrics = Metrics()
    stream = make_stream(metrics=metrics)
    put(stream, "a", now=12.0, queued=0.5)
    put(stream, "b", now=12.5, finish="stop")
    output = await stream.get()
    assert (output.request_id, output.prompt, output.prompt_token_ids) == ("r", "hello", [1, 2])
    assert output.num_cached_tokens == 16
    times = output.metrics
    assert (times.queue_time, times.ttft, times.last_token_time) == (0.5, 2.0, 12.5)
    counted = [(each.count, each.sum) for each in (metrics.queue_time, metrics.ttft)]
    assert (counted, metrics.e2e.count, metrics.finished["stop"]) == ([(1, 0.5), (1, 2.0)], 1, 1)


async def test_a_long_text_is_decoded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.front.streams.MAX_DECODED", 10)
    stream, text = make_stream("final"), "abc" * 20
    put(stream, text, finish="length")
    turns: list[int] = []
    asyncio.get_running_loop().call_soon(turns.append, 1)
    assert (await stream.get()).outputs[0].text == text and turns


def put_prompt(stream: OutputStream, *token_ids: int | None) -> None:
    """A part of the prompt's log-probabilities."""
    part = [None if i is None else TokenLogprobs(Logprob(i, -1.0, 1)) for i in token_ids]
    stream.take(stream.completions[0], Detail(0, prompt_logprobs=part), 0, 11.0)


def read_prompt(output: RequestOutput) -> list[int | None] | None:
    found = output.prompt_logprobs
    return None if found is None else [None if each is None else each.token.token_id for each in found]


@pytest.mark.parametrize("kind", ["delta", "cumulative", "final"])
@pytest.mark.parametrize("parts", [[[None], [2]], [[None], [None, 2]]], ids=["in parts", "anew"])
async def test_prompt_logprobs_are_told_as_a_whole(kind: str, parts: list[list[int | None]]) -> None:
    """A part that begins like the first one replaces those before it."""
    stream = make_stream(kind, prompt_logprobs=0)
    for part in parts:
        put_prompt(stream, *part)
        assert await is_silent(stream)
    put(stream, "a", finish="length")
    assert read_prompt(await stream.get()) == [None, 2]


async def test_prompt_logprobs_of_half_a_prompt_are_not_told() -> None:
    stream = make_stream(prompt_logprobs=0)
    put_prompt(stream, None)
    put(stream, "", finish="abort")
    assert read_prompt(await stream.get()) is None


class Reader:
    """Is woken in rounds; `works_s` is how long it then keeps the loop."""

    def __init__(self, works_s: float = 0.0) -> None:
        self.wake_times: list[float] = []
        self._works_s = works_s

    def wake(self) -> None:
        self.wake_times.append(time.monotonic())
        if self._works_s:
            asyncio.get_running_loop().call_soon(time.sleep, self._works_s)


async def test_news_during_a_round_come_with_the_next_one_and_once() -> None:
    pacing, reader = ReaderPacing(), Reader()
    group = [reader]
    for _ in range(5):
        pacing.wake(group)
    assert len(reader.wake_times) == 1
    await wait_until(lambda: len(reader.wake_times) == 2)
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(reader.wake_times) == 2


async def test_a_long_round_is_followed_by_a_rest_as_long() -> None:
    pacing, reader = ReaderPacing(), Reader(works_s=0.03)
    pacing.wake([reader])
    pacing.wake([reader])
    await wait_until(lambda: len(reader.wake_times) == 2)
    first, second = reader.wake_times
    assert second - first >= 0.055


async def test_after_a_rest_without_news_the_loop_is_quiet_again() -> None:
    pacing, reader = ReaderPacing(), Reader()
    group = [reader]
    for count in (1, 2, 3):
        await wait_until(lambda: not pacing._is_busy)
        pacing.wake(group)
        assert len(reader.wake_times) == count
