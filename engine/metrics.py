"""Metrics: counters and histograms written by the engine. EngineStats: an immutable copy for readers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np

from engine.messages import CoreStats, SourceCounts

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

CORE_COUNTERS = (
    *("num_steps", "num_step_tokens", "num_preemptions"),
    *("num_queried_tokens", "num_hit_tokens", "num_loaded_tokens"),
    *("num_received_tokens", "num_saved_tokens", "num_stateless_tokens", "num_windowless_tokens"),
)
NO_CORE = CoreStats()


class Histogram:
    """Counts per bucket; upper bounds are inclusive, as in Prometheus."""

    __slots__ = ("buckets", "counts", "sum")

    def __init__(self, buckets: tuple[float, ...]) -> None:
        self.buckets = buckets
        self.counts = [0] * (len(buckets) + 1)  # the last one is +Inf
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Add a value `count` times."""
        self.counts[bisect_left(self.buckets, value)] += count
        self.sum += value * count

    def observe_many(self, values: Sequence[float]) -> None:
        """Add many values at once; a step may bring 256."""
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
        """Return an independent copy."""
        twin = Histogram(self.buckets)
        twin.counts = list(self.counts)
        twin.sum = self.sum
        return twin


class Metrics:
    """Lives as long as the engine, over restarts. Written on the event loop."""

    def __init__(self) -> None:
        self.ended_cores = CoreStats()  # counters of those that have ended, added up
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.num_rejected = 0
        self.num_restarts = 0
        self.num_resumed = 0
        self.num_resumed_inexact = 0
        self.num_prefills = 0
        self.finished: dict[str, int] = {"stop": 0, "length": 0, "abort": 0, "error": 0, "dead_end": 0}
        self.ttft = Histogram(LATENCY_BUCKETS_S)
        self.itl = Histogram(LATENCY_BUCKETS_S)
        self.e2e = Histogram(LATENCY_BUCKETS_S)
        self.queue_time = Histogram(LATENCY_BUCKETS_S)
        self.grammar_compile = Histogram(LATENCY_BUCKETS_S)
        self.grammar_mask = Histogram(GAP_BUCKETS_S)
        self.step_gap = Histogram(GAP_BUCKETS_S)
        self.loop_lag = Histogram(GAP_BUCKETS_S)

    def observe_core(self, stats: CoreStats) -> None:
        """Count what a core has measured since its last message."""
        for gap_s in stats.step_gaps_s:
            self.step_gap.observe(gap_s)
        for time_s in stats.mask_times_s:
            self.grammar_mask.observe(time_s)

    def note_core_end(self, stats: CoreStats) -> None:
        """Keep the counters of a core that has ended; its gauges went with it."""
        sums = {name: getattr(self.ended_cores, name) + getattr(stats, name) for name in CORE_COUNTERS}
        self.ended_cores = CoreStats(**sums, drafts=add_counts(self.ended_cores.drafts, stats.drafts))

    def make_stats(
        self, core: CoreStats = NO_CORE, num_waiting: int = 0, num_opening: int = 0
    ) -> EngineStats:
        """All counters and histograms, with the gauges of a running core, if there is one.

        Args:
            num_waiting: completions that neither run nor wait for their grammar.
            num_opening: completions that wait for their grammar.
        """
        ended = self.ended_cores
        return EngineStats(
            num_running=core.num_running,
            num_waiting=num_waiting,
            num_waiting_for_grammar=num_opening,
            kv_usage=1.0 - core.num_free_blocks / core.num_blocks if core.num_blocks else 0.0,
            num_blocks=core.num_blocks,
            num_free_blocks=core.num_free_blocks,
            num_cached_blocks=core.num_cached_blocks,
            prompt_tokens=self.prompt_tokens,
            generation_tokens=self.generation_tokens,
            prefix_cache_queries=ended.num_queried_tokens + core.num_queried_tokens,
            prefix_cache_hits=ended.num_hit_tokens + core.num_hit_tokens,
            kv_offload_loads=ended.num_loaded_tokens + core.num_loaded_tokens,
            kv_received_tokens=ended.num_received_tokens + core.num_received_tokens,
            prefix_cache_stateless=ended.num_stateless_tokens + core.num_stateless_tokens,
            prefix_cache_windowless=ended.num_windowless_tokens + core.num_windowless_tokens,
            kv_saved_tokens=ended.num_saved_tokens + core.num_saved_tokens,
            num_preemptions=ended.num_preemptions + core.num_preemptions,
            num_steps=ended.num_steps + core.num_steps,
            num_step_tokens=ended.num_step_tokens + core.num_step_tokens,
            num_rejected=self.num_rejected,
            num_restarts=self.num_restarts,
            num_resumed=self.num_resumed,
            num_resumed_inexact=self.num_resumed_inexact,
            num_prefills=self.num_prefills,
            finished=dict(self.finished),
            drafts=add_counts(ended.drafts, core.drafts),
            histograms=self.histograms(),
        )

    def histograms(self) -> dict[str, Histogram]:
        """Copy the histograms, keyed by Prometheus name."""
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


def add_counts(one: dict[str, SourceCounts], other: dict[str, SourceCounts]) -> dict[str, SourceCounts]:
    """Return the sums by source."""
    found = dict(one)
    for source, counts in other.items():
        before = found.get(source, SourceCounts())
        pairs = zip_longest(before.accepted_per_position, counts.accepted_per_position, fillvalue=0)
        found[source] = SourceCounts(
            before.num_drafts + counts.num_drafts,
            before.num_draft_tokens + counts.num_draft_tokens,
            [sum(pair) for pair in pairs],
        )
    return found


@dataclass(frozen=True, slots=True)
class ReplicaStats:
    """State and load of one replica. Counters start anew when it restarts."""

    index: int
    state: str  # starting, ready, draining, asleep or dead
    num_requests: int  # sent to it and not finished
    num_running: int = 0
    kv_usage: float = 0.0  # share of the usable blocks owned by requests, 0 to 1
    num_queried_tokens: int = 0  # looked up in its prefix cache
    num_hit_tokens: int = 0
    num_restarts: int = 0
    error: str | None = None  # why its last core ended
    fingerprint: str = ""  # of weights, arithmetic and KV layout


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the start of the engine (restarts included), and gauges of this moment."""

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_for_grammar: int = 0
    kv_usage: float = 0.0  # share of the usable blocks owned by requests, 0 to 1
    num_blocks: int = 0  # without the null block
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0  # tokens looked up
    prefix_cache_hits: int = 0  # tokens found
    # Tokens whose KV was found, but not used: no state was kept there, or a window's blocks were evicted.
    prefix_cache_stateless: int = 0
    prefix_cache_windowless: int = 0
    kv_offload_loads: int = 0  # of the hits, tokens copied back from host memory
    kv_received_tokens: int = 0  # loaded from the store of several cores, in each group of layers
    kv_saved_tokens: int = 0  # saved there
    num_preemptions: int = 0
    num_steps: int = 0
    num_step_tokens: int = 0
    num_rejected: int = 0
    num_restarts: int = 0
    num_resumed: int = 0  # requests that another replica continued
    num_resumed_inexact: int = 0  # of these, by one with other weights, dtype or kernels
    num_prefills: int = 0  # prompts that went to a prefill replica first
    finished: dict[str, int] = field(default_factory=dict)  # by finish reason
    drafts: dict[str, SourceCounts] = field(default_factory=dict)  # speculative decoding, by source
    histograms: dict[str, Histogram] = field(default_factory=dict)

    @property
    def num_unfinished(self) -> int:
        """Number of accepted requests that have not ended, and of those whose grammar compiles."""
        return self.num_running + self.num_waiting + self.num_waiting_for_grammar
