"""OutputStream: deltas merge while nobody reads, every kind of output, and exactly one end."""

from __future__ import annotations

import asyncio

import pytest

from engine import EngineDead, Logprob, RequestTimeout, SamplingParams, TokenLogprobs
from engine.core.detokenizer import TextDelta
from engine.messages import RequestTokens
from engine.metrics import Metrics
from engine.output_stream import BUNDLE_STEPS, OutputStream, StreamGroup
from engine.outputs import FinishReason


def make_stream(kind: str = "delta", metrics: Metrics | None = None, **params: object) -> OutputStream:
    sampling = SamplingParams(output_kind=kind, **params)  # type: ignore[arg-type]
    return OutputStream("r", "hello", [1, 2], sampling, 10.0, None, metrics or Metrics())


def put(
    stream: OutputStream,
    text: str,
    *token_ids: int,
    index: int = 0,
    finish: FinishReason | None = None,
    logprobs: list[TokenLogprobs] | None = None,
    now: float = 11.0,
    scheduled: float | None = None,
) -> float:
    """What the detokenizer actor does for one request in one step."""
    ids = list(token_ids)
    item = RequestTokens(
        "r", ids, logprobs, None, finish, first_scheduled_time=scheduled, num_cached_tokens=16
    )
    gap = stream.put(index, item, TextDelta("r", text, ids, logprobs, None, finish), now)
    if stream.has_news:
        stream.wake()
    return gap


async def is_silent(stream: OutputStream) -> bool:
    """Whether a reader would have to wait."""
    try:
        await asyncio.wait_for(stream.get(), 0.01)
    except TimeoutError:
        return True
    return False


async def test_unread_deltas_merge_into_one() -> None:
    stream = make_stream()
    put(stream, "a", 1)
    put(stream, "bc", 2, 3)
    output = await stream.get()
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("abc", [1, 2, 3])
    assert await is_silent(stream)


async def test_a_delta_holds_only_what_is_new() -> None:
    stream = make_stream()
    put(stream, "a", 1)
    await stream.get()
    put(stream, "b", 2)
    assert (await stream.get()).outputs[0].text == "b"


async def test_cumulative_outputs_hold_all_there_is() -> None:
    stream = make_stream("cumulative")
    put(stream, "a", 1)
    first = (await stream.get()).outputs[0]
    put(stream, "b", 2)
    second = (await stream.get()).outputs[0]
    assert (first.text, first.token_ids) == ("a", [1])
    assert (second.text, second.token_ids) == ("ab", [1, 2])


async def test_a_final_output_comes_once_at_the_end() -> None:
    stream = make_stream("final")
    put(stream, "a", 1)
    assert await is_silent(stream)
    put(stream, "b", 2, finish="length")
    output = await stream.get()
    assert (output.outputs[0].text, output.outputs[0].finish_reason, output.finished) == (
        "ab",
        "length",
        True,
    )


@pytest.mark.parametrize("kind", ["delta", "cumulative", "final"])
async def test_only_the_last_output_is_finished(kind: str) -> None:
    stream = make_stream(kind)
    put(stream, "a", 1)
    if kind != "final":
        assert not (await stream.get()).finished
    put(stream, "", finish="stop")
    output = await stream.get()
    assert output.finished
    assert output.outputs[0].is_finished


async def test_n_completions_end_one_by_one() -> None:
    stream = make_stream("cumulative", n=2)
    put(stream, "a", 1, index=0, finish="stop")
    output = await stream.get()
    assert [completion.finish_reason for completion in output.outputs] == ["stop", None]
    assert not output.finished
    put(stream, "b", 2, index=1, finish="length")
    assert (await stream.get()).finished


async def test_a_final_output_waits_for_all_completions() -> None:
    stream = make_stream("final", n=2)
    put(stream, "b", 2, index=1, finish="stop")
    assert await is_silent(stream)
    put(stream, "a", 1, index=0, finish="stop")
    assert [completion.text for completion in (await stream.get()).outputs] == ["a", "b"]


async def test_deltas_name_only_the_completions_with_news() -> None:
    stream = make_stream(n=3)
    put(stream, "x", 1, index=2)
    assert [completion.index for completion in (await stream.get()).outputs] == [2]


async def test_a_finish_is_told_once_in_deltas() -> None:
    stream = make_stream(n=2)
    put(stream, "a", 1, index=0, finish="stop")
    told = [completion.finish_reason for completion in (await stream.get()).outputs]
    put(stream, "b", 2, index=1)
    told += [completion.finish_reason for completion in (await stream.get()).outputs]
    put(stream, "", index=1, finish="length")
    told += [completion.finish_reason for completion in (await stream.get()).outputs]
    assert told == ["stop", None, "length"]


async def test_logprobs_are_cut_like_the_tokens_and_summed_over_all() -> None:
    stream = make_stream(logprobs=0)
    for token_id in (1, 2):
        put(stream, "a", token_id, logprobs=[TokenLogprobs(Logprob(token_id, -0.5, 1))])
        completion = (await stream.get()).outputs[0]
        assert completion.logprobs is not None
        assert [entry.token.token_id for entry in completion.logprobs] == [token_id]
    assert completion.cumulative_logprob == -1.0


async def test_without_logprobs_there_is_no_sum() -> None:
    stream = make_stream()
    put(stream, "a", 1)
    completion = (await stream.get()).outputs[0]
    assert (completion.logprobs, completion.cumulative_logprob) == (None, None)


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
    put(stream, "a", 1, finish="stop")
    stream.fail(RequestTimeout("too late"))
    output = await stream.get()
    assert (output.finished, output.outputs[0].finish_reason) == (True, "stop")


async def test_what_comes_after_a_failure_does_not_revive_the_stream() -> None:
    stream = make_stream()
    stream.fail(RequestTimeout("the deadline passed"))
    stream.fail(EngineDead("the engine was closed"))
    put(stream, "a", 1)
    put(stream, "", finish="abort")
    assert stream.is_finished
    with pytest.raises(RequestTimeout):
        await stream.get()


async def test_outputs_tell_request_prompt_and_times() -> None:
    stream = make_stream()
    put(stream, "a", 1, now=12.0, scheduled=10.5)
    put(stream, "b", 2, now=12.5)
    output = await stream.get()
    assert (output.request_id, output.prompt, output.prompt_token_ids) == ("r", "hello", [1, 2])
    assert output.num_cached_tokens == 16
    assert (output.metrics.queue_time, output.metrics.ttft, output.metrics.last_token_time) == (
        0.5,
        2.0,
        12.5,
    )


async def test_the_gap_between_tokens_is_that_of_the_last_two() -> None:
    stream = make_stream()
    gaps = [put(stream, "a", 1, now=12.0), put(stream, "b", 2, now=12.5), put(stream, "", now=13.0)]
    assert gaps == [0.0, 0.5, 0.0]


async def test_metrics_count_each_request_once() -> None:
    metrics = Metrics()
    stream = make_stream(metrics=metrics)
    put(stream, "a", 1, now=12.0, scheduled=10.5)
    put(stream, "b", 2, now=14.0, finish="stop")
    assert (metrics.ttft.count, metrics.ttft.sum) == (1, 2.0)
    assert (metrics.queue_time.count, metrics.queue_time.sum) == (1, 0.5)
    assert (metrics.e2e.sum, metrics.finished["stop"]) == (4.0, 1)


def make_group(*streams: OutputStream) -> StreamGroup:
    return StreamGroup([(stream, 0) for stream in streams])


async def test_a_group_gives_each_of_its_streams_a_token() -> None:
    streams = [make_stream(), make_stream("cumulative")]
    group, gaps = make_group(*streams), Metrics().itl
    for stream in streams:
        put(stream, "a", 1, now=11.0)
        await stream.get()
    group.put([2, 3], ["b", "c"], 11.5, gaps)
    for stream in group.awaited:
        stream.wake()
    assert [(await stream.get()).outputs[0].text for stream in streams] == ["b", "ac"]
    assert (gaps.count, gaps.sum) == (2, 1.0)


async def test_a_group_counts_one_gap_for_each_token() -> None:
    stream, gaps = make_stream("final"), Metrics().itl
    put(stream, "a", 1, now=11.0)
    group = make_group(stream)
    for now in (11.5, 12.5):
        group.put([2], ["b"], now, gaps)
    assert (gaps.count, gaps.sum) == (2, 1.5)
    group.flush()
    put(stream, "", finish="length", now=13.0)
    output = await stream.get()
    assert (output.outputs[0].text, output.metrics.last_token_time) == ("abb", 12.5)


async def test_a_group_hands_on_every_step_in_order() -> None:
    """More steps than a bundle has, and two streams, so that nothing can be lost or swapped unseen."""
    streams = [make_stream("final"), make_stream("final")]
    for stream in streams:
        put(stream, "-", 0)
    group, steps = make_group(*streams), range(1, BUNDLE_STEPS + 10)
    for step in steps:
        group.put([step, -step], [f"{step},", f"{-step},"], 11.0, Metrics().itl)
    group.flush()
    group.flush()
    for sign, stream in zip((1, -1), streams, strict=True):
        put(stream, "", finish="length")
        output = (await stream.get()).outputs[0]
        assert output.token_ids == [0, *(sign * step for step in steps)]
        assert output.text == "-" + "".join(f"{sign * step}," for step in steps)


async def test_a_late_wake_without_news_tells_nothing() -> None:
    """A reader may have been told by something else since its wake-up was put off."""
    stream = make_stream()
    put(stream, "a", 1)
    await stream.get()
    stream.wake()
    assert await is_silent(stream)
