"""Metrics: counters and histograms the actors write, and EngineStats, the snapshot everyone else reads."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

LATENCY_BUCKETS_S = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    300.0,
)
GAP_BUCKETS_S = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)


class Histogram:
    """Counts per bucket; a value falls into the first bucket whose upper bound is not below it."""

    __slots__ = ("buckets", "counts", "sum")

    def __init__(self, buckets: tuple[float, ...]) -> None:
        self.buckets = buckets
        self.counts = [0] * (len(buckets) + 1)  # the last one is +Inf
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count a value, once or as often as it came."""
        self.counts[bisect_left(self.buckets, value)] += count
        self.sum += value * count

    def observe_many(self, values: Sequence[float]) -> None:
        """As `observe` for each, at the price of a few: 256 values come with every step."""
        if not values:
            return
        places = np.searchsorted(self.buckets, values)
        for place, count in enumerate(np.bincount(places, minlength=len(self.counts)).tolist()):
            self.counts[place] += count
        self.sum += sum(values)

    @property
    def count(self) -> int:
        return sum(self.counts)

    def copy(self) -> Histogram:
        """A twin that later values do not change."""
        twin = Histogram(self.buckets)
        twin.counts = list(self.counts)
        twin.sum = self.sum
        return twin


class Metrics:
    """Lives as long as the engine, over restarts. Written on the event loop, but for one histogram."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_step_tokens = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.num_preemptions = 0
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.num_rejected = 0
        self.num_restarts = 0
        self.finished: dict[str, int] = {"stop": 0, "length": 0, "abort": 0, "error": 0, "dead_end": 0}
        self.ttft = Histogram(LATENCY_BUCKETS_S)
        self.itl = Histogram(LATENCY_BUCKETS_S)
        self.e2e = Histogram(LATENCY_BUCKETS_S)
        self.queue_time = Histogram(LATENCY_BUCKETS_S)
        self.grammar_compile = Histogram(LATENCY_BUCKETS_S)
        self.grammar_mask = Histogram(GAP_BUCKETS_S)  # written by the grammar thread, and by nobody else
        self.step_gap = Histogram(GAP_BUCKETS_S)
        self.loop_lag = Histogram(GAP_BUCKETS_S)

    def count_step(self, num_tokens: int) -> None:
        self.num_steps += 1
        self.num_step_tokens += num_tokens

    def make_stats(self, **gauges: float) -> EngineStats:
        """All counters and histograms, with the gauges of a running core, if there is one."""
        return EngineStats(
            prompt_tokens=self.prompt_tokens,
            generation_tokens=self.generation_tokens,
            prefix_cache_queries=self.num_queried_tokens,
            prefix_cache_hits=self.num_hit_tokens,
            num_preemptions=self.num_preemptions,
            num_steps=self.num_steps,
            num_step_tokens=self.num_step_tokens,
            num_rejected=self.num_rejected,
            num_restarts=self.num_restarts,
            finished=dict(self.finished),
            histograms=self.histograms(),
            **gauges,  # type: ignore[arg-type]
        )

    def histograms(self) -> dict[str, Histogram]:
        """Copies, under their Prometheus names."""
        return {
            "time_to_first_token_seconds": self.ttft.copy(),
            "inter_token_latency_seconds": self.itl.copy(),
            "e2e_request_latency_seconds": self.e2e.copy(),
            "request_queue_time_seconds": self.queue_time.copy(),
            "grammar_compile_seconds": self.grammar_compile.copy(),
            "grammar_mask_seconds": self.grammar_mask.copy(),
            "step_gap_seconds": self.step_gap.copy(),
            "event_loop_lag_seconds": self.loop_lag.copy(),
        }


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot. Counters count from the start of the engine and survive restarts."""

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_for_grammar: int = 0
    kv_usage: float = 0.0  # share of the blocks owned by requests, 0 to 1
    num_blocks: int = 0  # usable ones
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0  # tokens looked up
    prefix_cache_hits: int = 0  # tokens found
    num_preemptions: int = 0
    num_steps: int = 0
    num_step_tokens: int = 0
    num_rejected: int = 0
    num_restarts: int = 0
    finished: dict[str, int] = field(default_factory=dict)  # by finish reason
    histograms: dict[str, Histogram] = field(default_factory=dict)

    @property
    def num_unfinished(self) -> int:
        """Requests that have come and not ended."""
        return self.num_running + self.num_waiting + self.num_waiting_for_grammar
