"""Metrics: histograms and their copies. A snapshot says where every request is and who owns which block."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import EngineSnapshot, EngineStats, Histogram, RequestMetrics, SamplingParams, stats_log
from engine.core.snapshot import take_snapshot
from engine.messages import CoreStats
from engine.metrics import Metrics
from engine.stats_log import describe_load
from tests.engine.core.harness import SchedulerHarness, make_request


def test_a_value_on_a_bound_belongs_below_it() -> None:
    """As Prometheus has it: `le` means at most."""
    histogram = Histogram((1.0, 2.0, 5.0))
    for value in (0.0, 1.0, 1.5, 2.0, 5.0, 5.5):
        histogram.observe(value)
    assert (histogram.counts, histogram.count, histogram.sum) == ([2, 2, 1, 1], 6, 15.0)


@given(values=st.lists(st.floats(0, 10)))
def test_many_at_once_count_as_each_alone(values: list[float]) -> None:
    at_once, one_by_one = Histogram((1.0, 2.0, 5.0)), Histogram((1.0, 2.0, 5.0))
    at_once.observe_many(values)
    for value in values:
        one_by_one.observe(value)
    assert at_once.counts == one_by_one.counts
    assert at_once.sum == pytest.approx(one_by_one.sum)


def test_a_snapshot_of_all_histograms_stands_still() -> None:
    metrics = Metrics()
    before = metrics.histograms()
    metrics.ttft.observe(0.2)
    old, new = (each["time_to_first_token_seconds"] for each in (before, metrics.histograms()))
    assert (old.count, sum(old.counts), new.count, new.sum) == (0, 0, 1, 0.2)
    assert all(list(each.buckets) == sorted(set(each.buckets)) for each in before.values())


def test_counters_go_on_behind_those_of_cores_that_have_ended() -> None:
    metrics = Metrics()
    metrics.note_core_end(CoreStats(num_steps=5, num_step_tokens=50, num_preemptions=1, num_running=3))
    metrics.note_core_end(CoreStats(num_steps=1, prefix_cache_hits=16), replica=1)
    assert metrics.add_ended(CoreStats(num_steps=2, num_running=4), 1) == CoreStats(
        num_steps=3, num_running=4, prefix_cache_hits=16
    )
    stats = metrics.make_stats(CoreStats(num_steps=2, num_step_tokens=7, num_blocks=10, num_free_blocks=4))
    assert (stats.num_steps, stats.num_step_tokens, stats.num_preemptions) == (8, 57, 1)
    assert (stats.prefix_cache_hits, stats.num_running, stats.kv_usage) == (16, 0, 0.6)


def test_the_end_of_a_request_fills_its_histograms() -> None:
    metrics = Metrics()
    params = SamplingParams(n=2, max_tokens=9)
    metrics.observe_end(RequestMetrics(1.0, 2.0, 4.0, 7.0), [4, 2], params)
    metrics.observe_core(CoreStats(step_tokens=[3, 5]))
    sums = {name: each.sum for name, each in metrics.histograms().items() if each.count}
    assert sums == {
        "request_prefill_time_seconds": 2.0, "request_decode_time_seconds": 3.0,
        "request_inference_time_seconds": 5.0, "request_time_per_output_token_seconds": 1.0,
        "request_max_num_generation_tokens": 4.0, "request_params_n": 2.0, "request_params_max_tokens": 9.0,
        "iteration_tokens_total": 8.0,
    }  # fmt: skip
    metrics.observe_end(RequestMetrics(1.0), [0], SamplingParams())  # it never ran


def test_the_line_about_the_load_has_rates_since_the_last_one() -> None:
    before = EngineStats(prompt_tokens=100, generation_tokens=50, prefix_cache_queries=10, prefix_cache_hits=10)
    now = EngineStats(
        num_running=3, num_waiting=1, num_waiting_for_grammar=1, kv_usage=0.125, prompt_tokens=300,
        generation_tokens=90, prefix_cache_queries=30, prefix_cache_hits=15,
    )  # fmt: skip
    assert describe_load(before, now, 10.0) == (
        "prompt 20.0 tokens/s, output 4.0 tokens/s, running 3, waiting 2, KV cache 12.5%, prefix cache hits 25.0%"
    )


async def test_the_load_is_logged_while_there_is_work(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stats_log, "INTERVAL_S", 0.0)
    caplog.set_level("INFO", "troupe.engine")
    looks = iter([EngineStats(), EngineStats(), EngineStats(num_steps=1), EngineStats(num_steps=1)])
    with pytest.raises(RuntimeError):  # there is no further look
        await stats_log.log_stats(lambda: next(looks))
    assert len(caplog.messages) == 1


def look(house: SchedulerHarness) -> EngineSnapshot:
    return take_snapshot(house.scheduler)


def test_running_requests_come_first_and_waiting_ones_in_their_order() -> None:
    """A prompt that is computed in chunks is prefill until it is known."""
    house = SchedulerHarness(max_num_seqs=1, max_steps_in_flight=1)
    for name in ("first", "second", "third"):
        house.add(make_request(name, [*range(40)], max_tokens=9))
    views = look(house).requests
    phases = [(view.request_id, view.phase) for view in views]
    assert phases == [("first", "prefill"), ("second", "queued"), ("third", "queued")]
    assert (views[0].num_computed_tokens, views[0].num_prompt_tokens) == (16, 40)
    for _ in range(3):
        house.work()
        house.answer()
    assert look(house).requests[0].phase == "decode"


def test_a_request_that_lost_its_blocks_is_preempted_and_owns_none() -> None:
    house = SchedulerHarness(num_blocks=9, caching=False)
    house.add(make_request("kept", [*range(12)], max_tokens=20))
    house.add(make_request("lost", [*range(40, 52)], max_tokens=20))
    while not house.scheduler.state.num_preemptions:
        house.work()
        house.answer()
    views = {view.request_id: view for view in look(house).requests}
    assert views["lost"].phase == "preempted" and views["lost"].block_ids == ()
    assert views["lost"].num_preemptions == 1 and views["kept"].phase == "decode"


def test_blocks_are_those_of_the_pool_and_may_be_left_out() -> None:
    house = SchedulerHarness()
    house.add(make_request("a", [*range(9)], max_tokens=3))
    house.add(make_request("b", [*range(9)], max_tokens=3))
    snapshot = look(house)
    owned = {block_id for view in snapshot.requests for block_id in view.block_ids}
    assert owned == set(house.kv_cache.pool.owned_ids()) and 0 not in owned
    assert len(snapshot.cached_block_ids) == len(house.kv_cache.pool.by_hash) > 0
    light = take_snapshot(house.scheduler, with_blocks=False)
    for view, slim in zip(snapshot.requests, light.requests, strict=True):
        assert slim == dataclasses.replace(view, block_ids=(), age_s=slim.age_s)
    assert light.cached_block_ids == ()
    house.run()
    assert look(house).requests == ()
