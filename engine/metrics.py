"""Metrics: counters and histograms written by the engine. EngineStats: an immutable copy for readers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

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

Kind = Literal["gauge", "counter"]
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
        # Counters of EngineStats.
        self.prompt_tokens = self.generation_tokens = self.num_rejected = self.num_restarts = 0
        self.num_resumed = self.num_resumed_inexact = self.num_prefills = 0
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
        sums = add_fields([self.ended_cores, stats], CORE_COUNTERS)
        self.ended_cores = CoreStats(**sums, drafts=add_counts(self.ended_cores.drafts, stats.drafts))

    def make_stats(
        self, core: CoreStats = NO_CORE, num_waiting: int = 0, num_opening: int = 0
    ) -> EngineStats:
        """All counters and histograms, with the gauges of a running core, if there is one.

        Args:
            num_waiting: completions that neither run nor wait for their grammar.
            num_opening: completions that wait for their grammar.
        """
        return EngineStats(
            **{name: getattr(core, name) for name in CORE_GAUGES},
            **{name: getattr(self, name) for name in FRONT_COUNTERS},
            **add_fields([self.ended_cores, core], CORE_COUNTERS),
            num_waiting=num_waiting,
            num_waiting_for_grammar=num_opening,
            kv_usage=1.0 - core.num_free_blocks / core.num_blocks if core.num_blocks else 0.0,
            finished=dict(self.finished),
            drafts=add_counts(self.ended_cores.drafts, core.drafts),
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
    """Counters since the start of the engine (restarts included), and gauges of this moment.

    A field is annotated with its kind, its name in Prometheus and its help.
    """

    num_running: Annotated[int, "gauge", "num_requests_running", "Requests in the running batch."] = 0
    num_waiting: Annotated[int, "gauge", "num_requests_waiting", "Requests that wait to be scheduled."] = 0
    num_waiting_for_grammar: Annotated[int, "gauge", "num_requests_waiting_for_grammar",
        "Requests that wait for a grammar."] = 0
    kv_usage: Annotated[float, "gauge", "kv_cache_usage_perc",
        "Share of the KV blocks that requests own; 1 is all of them."] = 0.0
    num_blocks: Annotated[int, "gauge", "kv_cache_blocks", "KV cache blocks, without the null block."] = 0
    num_free_blocks: Annotated[int, "gauge", "kv_cache_free_blocks", "KV cache blocks no request owns."] = 0
    num_cached_blocks: Annotated[int, "gauge", "kv_cache_cached_blocks",
        "KV cache blocks that a prefix can be found in."] = 0
    prompt_tokens: Annotated[int, "counter", "prompt_tokens", "Prompt tokens processed."] = 0
    generation_tokens: Annotated[int, "counter", "generation_tokens", "Tokens generated."] = 0
    prefix_cache_queries: Annotated[int, "counter", "prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache."] = 0
    prefix_cache_hits: Annotated[int, "counter", "prefix_cache_hits",
        "Prompt tokens found in the prefix cache."] = 0
    prefix_cache_stateless: Annotated[int, "counter", "prefix_cache_stateless",
        "Prompt tokens whose KV was found, but not used: no state was kept there."] = 0
    prefix_cache_windowless: Annotated[int, "counter", "prefix_cache_windowless",
        "Prompt tokens whose KV was found, but not used: blocks of a group with a window were evicted."] = 0
    kv_offload_loads: Annotated[int, "counter", "kv_offload_loads",
        "Tokens of these hits copied back from host memory."] = 0
    num_prefills: Annotated[int, "counter", "kv_transfer_prefills",
        "Prompts that went to a prefill replica first."] = 0
    kv_received_tokens: Annotated[int, "counter", "kv_transfer_received_tokens",
        "Tokens loaded from the store of several cores, in each group of layers."] = 0
    kv_saved_tokens: Annotated[int, "counter", "kv_transfer_saved_tokens",
        "Tokens saved in the store of several cores."] = 0
    num_preemptions: Annotated[int, "counter", "num_preemptions",
        "Times a running request lost its blocks."] = 0
    num_steps: Annotated[int, "counter", "engine_steps", "Steps of the engine."] = 0
    num_step_tokens: Annotated[int, "counter", "engine_step_tokens", "Tokens computed in these steps."] = 0
    num_rejected: Annotated[int, "counter", "admission_rejections",
        "Requests refused because the queue was full."] = 0
    num_restarts: Annotated[int, "counter", "engine_restarts", "Restarts after a crash."] = 0
    num_resumed: Annotated[int, "counter", "requests_resumed",
        "Requests that another replica continued."] = 0
    num_resumed_inexact: Annotated[int, "counter", "requests_resumed_inexact",
        "Requests that a replica with other weights, dtype or kernels continued."] = 0
    finished: dict[str, int] = field(default_factory=dict)  # by finish reason
    drafts: dict[str, SourceCounts] = field(default_factory=dict)  # speculative decoding, by source
    histograms: dict[str, Histogram] = field(default_factory=dict)

    @property
    def num_unfinished(self) -> int:
        """Number of accepted requests that have not ended, and of those whose grammar compiles."""
        return self.num_running + self.num_waiting + self.num_waiting_for_grammar


def list_metrics() -> list[tuple[str, Kind, str, str]]:
    """Return the numbers of EngineStats: field, kind, name in Prometheus, help."""
    hints = get_type_hints(EngineStats, include_extras=True)
    return [(name, *get_args(hint)[1:]) for name, hint in hints.items() if get_origin(hint) is Annotated]


def add_fields(parts: Sequence[CoreStats], names: Sequence[str]) -> dict[str, Any]:
    """Return the sums of these fields."""
    return {name: sum(getattr(each, name) for each in parts) for name in names}


def _list_fields(kind: Kind, is_core: bool) -> tuple[str, ...]:
    found = [name for name, its_kind, *_ in list_metrics() if its_kind == kind]
    return tuple(name for name in found if hasattr(NO_CORE, name) is is_core)


CORE_COUNTERS, FRONT_COUNTERS = _list_fields("counter", True), _list_fields("counter", False)
CORE_GAUGES = _list_fields("gauge", True)
