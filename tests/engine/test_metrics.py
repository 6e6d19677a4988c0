"""Histogram: buckets, sums, quantiles, copies. Metrics: what the snapshot is made of."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import Histogram
from engine.metrics import GAP_BUCKETS_S, LATENCY_BUCKETS_S, Metrics

BUCKETS = (1.0, 2.0, 5.0)


def make_histogram(values: Sequence[float] = ()) -> Histogram:
    histogram = Histogram(BUCKETS)
    for value in values:
        histogram.observe(value)
    return histogram


@pytest.mark.parametrize(("value", "place"), [(0.0, 0), (1.0, 0), (1.1, 1), (2.0, 1), (5.0, 2), (5.1, 3)])
def test_a_value_on_a_bound_belongs_below_it(value: float, place: int) -> None:
    """As Prometheus has it: `le` means at most."""
    counts = make_histogram([value]).counts
    assert counts.index(1) == place
    assert len(counts) == len(BUCKETS) + 1


def test_count_and_sum_are_those_of_the_values() -> None:
    histogram = make_histogram([0.5, 1.5, 99.0])
    assert (histogram.count, histogram.sum) == (3, 101.0)


@given(values=st.lists(st.floats(0, 10)))
def test_many_at_once_count_as_each_alone(values: list[float]) -> None:
    at_once = make_histogram()
    at_once.observe_many(values)
    one_by_one = make_histogram(values)
    assert at_once.counts == one_by_one.counts
    assert at_once.sum == pytest.approx(one_by_one.sum)


def test_a_copy_stands_still() -> None:
    histogram = make_histogram([0.5])
    twin = histogram.copy()
    histogram.observe(1.5)
    assert (twin.counts, twin.sum, twin.buckets) == ([1, 0, 0, 0], 0.5, BUCKETS)


def test_a_snapshot_of_all_histograms_stands_still() -> None:
    metrics = Metrics()
    before = metrics.histograms()
    metrics.ttft.observe(0.2)
    assert before["time_to_first_token_seconds"].count == 0
    assert metrics.histograms()["time_to_first_token_seconds"].count == 1


def test_a_step_counts_its_tokens() -> None:
    metrics = Metrics()
    metrics.count_step(7)
    metrics.count_step(3)
    assert (metrics.num_steps, metrics.num_step_tokens) == (2, 10)


@pytest.mark.parametrize("buckets", [LATENCY_BUCKETS_S, GAP_BUCKETS_S])
def test_buckets_rise(buckets: tuple[float, ...]) -> None:
    assert list(buckets) == sorted(set(buckets))
