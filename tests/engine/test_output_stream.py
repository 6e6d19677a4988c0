"""OutputStream: deltas merge while nobody reads, every kind of output, and exactly one end."""

import asyncio

import pytest

from engine import EngineDead, Logprob, RequestOutput, RequestTimeout, SamplingParams, TokenLogprobs
from engine.core.detokenizer import TextDelta
from engine.messages import Detail
from engine.metrics import Metrics
from engine.output_stream import BUNDLE_STEPS, OutputStream, StreamGroup
from engine.outputs import FinishReason


def make_stream(kind: str = "delta", metrics: Metrics | None = None, **params: object) -> OutputStream:
    sampling = SamplingParams(output_kind=kind, **params)  # type: ignore[arg-type]
    return OutputStream("r", "hello", [1, 2], sampling, 10.0, metrics or Metrics())


def put(
    stream: OutputStream,
    text: str,
    *token_ids: int,
    index: int = 0,
    finish: FinishReason | None = None,
    logprobs: list[TokenLogprobs] | None = None,
    now: float = 11.0,
    queued: float | None = None,
) -> float:
    """What the detokenizer actor does for one request in one step."""
    ids = list(token_ids)
    detail = Detail(9, finish_reason=finish, queue_time_s=queued, num_cached_tokens=16)
    gap = stream.put(index, TextDelta(text, ids, logprobs, None, finish), detail, now)
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


async def test_unread_deltas_merge_into_one_and_hold_only_what_is_new() -> None:
    """A reader may have been told by something else since its wake-up was put off."""
    stream = make_stream()
    put(stream, "a", 1)
    put(stream, "bc", 2, 3)
    output = await stream.get()
    assert (output.outputs[0].text, output.outputs[0].token_ids, output.finished) == ("abc", [1, 2, 3], False)
    assert (output.outputs[0].logprobs, output.outputs[0].cumulative_logprob) == (None, None)
    stream.wake()
    assert await is_silent(stream)
    put(stream, "d", 4, finish="stop")
    output = await stream.get()
    assert (output.outputs[0].text, output.finished, output.outputs[0].is_finished) == ("d", True, True)


async def test_cumulative_outputs_hold_all_there_is() -> None:
    stream = make_stream("cumulative")
    told = []
    for text, token_id, finish in (("a", 1, None), ("b", 2, "length")):
        put(stream, text, token_id, finish=finish)  # type: ignore[arg-type]
        output = await stream.get()
        told.append((output.outputs[0].text, output.outputs[0].token_ids, output.finished))
    assert told == [("a", [1], False), ("ab", [1, 2], True)]


async def test_n_completions_end_one_by_one() -> None:
    stream = make_stream("cumulative", n=2)
    put(stream, "a", 1, index=0, finish="stop")
    output = await stream.get()
    assert [completion.finish_reason for completion in output.outputs] == ["stop", None]
    assert not output.finished
    put(stream, "b", 2, index=1, finish="length")
    assert (await stream.get()).finished


async def test_a_final_output_comes_once_all_completions_have_ended() -> None:
    stream = make_stream("final", n=2)
    put(stream, "a", 1, index=0)
    put(stream, "b", 2, index=1, finish="stop")
    assert await is_silent(stream)
    put(stream, "c", 3, index=0, finish="length")
    output = await stream.get()
    assert [(each.text, each.finish_reason) for each in output.outputs] == [("ac", "length"), ("b", "stop")]
    assert output.finished


async def test_deltas_name_only_completions_with_news_and_a_finish_once() -> None:
    stream, told = make_stream(n=3), []
    for index, finish in ((2, "stop"), (1, None), (1, "length")):
        put(stream, "a", 1, index=index, finish=finish)  # type: ignore[arg-type]
        told += [(each.index, each.finish_reason) for each in (await stream.get()).outputs]
    assert told == [(2, "stop"), (1, None), (1, "length")]


async def test_logprobs_are_cut_like_the_tokens_and_summed_over_all() -> None:
    stream = make_stream(logprobs=0)
    for token_id in (1, 2):
        put(stream, "a", token_id, logprobs=[TokenLogprobs(Logprob(token_id, -0.5, 1))])
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
    metrics = Metrics()
    stream = make_stream(metrics=metrics)
    put(stream, "a", 1, now=12.0, queued=0.5)
    put(stream, "b", 2, now=12.5, finish="stop")
    output = await stream.get()
    assert (output.request_id, output.prompt, output.prompt_token_ids) == ("r", "hello", [1, 2])
    assert output.num_cached_tokens == 16
    times = output.metrics
    assert (times.queue_time, times.ttft, times.last_token_time) == (0.5, 2.0, 12.5)
    counted = [(each.count, each.sum) for each in (metrics.queue_time, metrics.ttft, metrics.e2e)]
    assert (counted, metrics.finished["stop"]) == ([(1, 0.5), (1, 2.0), (1, 2.5)], 1)


async def test_the_gap_between_tokens_is_that_of_the_last_two() -> None:
    stream = make_stream()
    gaps = [put(stream, "a", 1, now=12.0), put(stream, "b", 2, now=12.5), put(stream, "", now=13.0)]
    assert gaps == [0.0, 0.5, 0.0]


async def test_a_group_gives_each_of_its_streams_a_token() -> None:
    streams = [make_stream(), make_stream("cumulative")]
    group, gaps = StreamGroup([(stream, 0) for stream in streams]), Metrics().itl
    for stream in streams:
        put(stream, "a", 1, now=11.0)
        await stream.get()
    group.put([2, 3], ["b", "c"], 11.5, gaps)
    for stream in group.awaited:
        stream.wake()
    assert [(await stream.get()).outputs[0].text for stream in streams] == ["b", "ac"]
    assert (gaps.count, gaps.sum) == (2, 1.0)


async def test_a_group_hands_on_every_step_in_order() -> None:
    """More steps than a bundle has, and two streams, so that nothing can be lost or swapped unseen."""
    streams, gaps = [make_stream("final"), make_stream("final")], Metrics().itl
    for stream in streams:
        put(stream, "-", 0, now=11.0)
    group, steps = StreamGroup([(stream, 0) for stream in streams]), range(1, BUNDLE_STEPS + 10)
    for step in steps:
        group.put([step, -step], [f"{step},", f"{-step},"], 11.0 + step, gaps)
    assert (gaps.count, gaps.sum) == (2 * len(steps), 2.0 * len(steps))
    group.flush()
    group.flush()
    for sign, stream in zip((1, -1), streams, strict=True):
        put(stream, "", finish="length", now=10**6)
        output = await stream.get()
        assert output.outputs[0].token_ids == [0, *(sign * step for step in steps)]
        assert output.outputs[0].text == "-" + "".join(f"{sign * step}," for step in steps)
        assert output.metrics.last_token_time == 11.0 + len(steps)


def put_prompt(stream: OutputStream, *token_ids: int | None) -> None:
    """A part of the prompt's log-probabilities."""
    part = [None if i is None else TokenLogprobs(Logprob(i, -1.0, 1)) for i in token_ids]
    stream.put(0, TextDelta("", [], None, part), Detail(9, prompt_logprobs=part), 11.0)


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
    put(stream, "a", 5, finish="length")
    assert read_prompt(await stream.get()) == [None, 2]


async def test_prompt_logprobs_of_half_a_prompt_are_not_told() -> None:
    stream = make_stream(prompt_logprobs=0)
    put_prompt(stream, None)
    put(stream, "", finish="abort")
    assert read_prompt(await stream.get()) is None
