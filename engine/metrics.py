"""Metrics: counters and histograms written by the engine. EngineStats: an immutable copy for readers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import zip_longest
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import numpy as np

from engine.messages import CoreStats, SourceCounts
from engine.outputs import RequestMetrics
from engine.sampling_params import SamplingParams

LATENCY_BUCKETS_S = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)
GAP_BUCKETS_S = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)
TOKEN_BUCKETS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))
CHOICE_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 256.0)

Kind = Literal["gauge", "counter"]
NO_CORE = CoreStats()


class Histogram:
    """Counts per bucket; upper bounds are inclusive, as in Prometheus."""

    __slots__ = ("buckets", "counts", "help", "sum")

    def __init__(self, buckets: tuple[float, ...], help: str = "") -> None:
        self.buckets = buckets
        self.help = help
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
        twin = Histogram(self.buckets, self.help)
        twin.counts = list(self.counts)
        twin.sum = self.sum
        return twin


class Metrics:
    """Lives as long as the engine, over restarts. Written on the event loop."""

    def __init__(self) -> None:
        self.ended_cores: dict[int, CoreStats] = {}  # counters of those that have ended, by replica
        # Counters of EngineStats.
        self.prompt_tokens = self.generation_tokens = self.num_rejected = self.num_restarts = 0
        self.num_resumed = self.num_resumed_inexact = self.num_prefills = self.prompt_tokens_cached = 0
        self.finished: dict[str, int] = {"stop": 0, "length": 0, "abort": 0, "error": 0, "dead_end": 0}
        self._histograms: dict[str, Histogram] = {}  # by name in Prometheus
        add = self._add
        self.ttft = add("time_to_first_token_seconds", LATENCY_BUCKETS_S, "From arrival to the first token.")
        self.itl = add("inter_token_latency_seconds", LATENCY_BUCKETS_S, "Between two tokens of a request.")
        self.e2e = add("e2e_request_latency_seconds", LATENCY_BUCKETS_S, "From arrival to the end.")
        self.queue_time = add("request_queue_time_seconds", LATENCY_BUCKETS_S, "From arrival to the first step.")
        self.prefill_time = add(
            "request_prefill_time_seconds", LATENCY_BUCKETS_S, "From the first step to the first token."
        )
        self.decode_time = add(
            "request_decode_time_seconds", LATENCY_BUCKETS_S, "From the first token to the last one."
        )
        self.inference_time = add(
            "request_inference_time_seconds", LATENCY_BUCKETS_S, "From the first step to the last token."
        )
        self.token_time = add(
            "request_time_per_output_token_seconds", LATENCY_BUCKETS_S, "Mean time of a token after the first."
        )
        self.num_prompt_tokens = add("request_prompt_tokens", TOKEN_BUCKETS, "Prompt tokens of a request.")
        self.num_output_tokens = add("request_generation_tokens", TOKEN_BUCKETS, "Output tokens of a completion.")
        self.longest_output = add(
            "request_max_num_generation_tokens", TOKEN_BUCKETS, "Output tokens of the longest completion of a request."
        )
        self.max_tokens = add("request_params_max_tokens", TOKEN_BUCKETS, "Limits of the requests that have one.")
        self.num_choices = add("request_params_n", CHOICE_BUCKETS, "Completions of a request.")
        self.step_tokens = add("iteration_tokens_total", TOKEN_BUCKETS, "Tokens computed in one step.")
        self.grammar_compile = add("grammar_compile_seconds", LATENCY_BUCKETS_S, "Compiling one grammar.")
        self.grammar_mask = add("grammar_mask_seconds", GAP_BUCKETS_S, "Filling the masks of one step.")
        self.step_gap = add(
            "step_gap_seconds", GAP_BUCKETS_S,
            "From the end of a step behind which no other was queued to the start of the next, while there was work: "
            "how long the device waited. Steps that follow each other without such a gap are not counted.",
        )  # fmt: skip
        self.loop_lag = add("event_loop_lag_seconds", GAP_BUCKETS_S, "How late the event loop wakes up.")

    def _add(self, name: str, buckets: tuple[float, ...], text: str) -> Histogram:
        found = self._histograms[name] = Histogram(buckets, text)
        return found

    def observe_core(self, stats: CoreStats) -> None:
        """Count what a core has measured since its last message."""
        for gap_s in stats.step_gaps_s:
            self.step_gap.observe(gap_s)
        for time_s in stats.mask_times_s:
            self.grammar_mask.observe(time_s)
        for num_tokens in stats.step_tokens:
            self.step_tokens.observe(num_tokens)

    def observe_end(self, times: RequestMetrics, counts: Sequence[int], params: SamplingParams) -> None:
        """Count a request that has ended."""
        self.longest_output.observe(max(counts))
        self.num_choices.observe(params.n)
        if params.max_tokens is not None:
            self.max_tokens.observe(params.max_tokens)
        start, first, last = times.first_scheduled_time, times.first_token_time, times.last_token_time
        if start is None or first is None or last is None:
            return
        self.prefill_time.observe(first - start)
        self.decode_time.observe(last - first)
        self.inference_time.observe(last - start)
        if counts[0] > 1:
            self.token_time.observe((last - first) / (counts[0] - 1))

    def note_core_end(self, stats: CoreStats, replica: int = 0) -> None:
        """Keep the counters of a core that has ended; its gauges went with it."""
        self.ended_cores[replica] = self.add_ended(stats, replica)

    def add_ended(self, stats: CoreStats, replica: int) -> CoreStats:
        """Return a replica's gauges, and its counters with those of its earlier cores."""
        before = self.ended_cores.get(replica, NO_CORE)
        sums = add_fields([before, stats], CORE_COUNTERS)
        return msgspec.structs.replace(stats, **sums, drafts=add_counts(before.drafts, stats.drafts))

    def make_stats(
        self, core: CoreStats = NO_CORE, num_waiting: int = 0, num_opening: int = 0
    ) -> EngineStats:
        """All counters and histograms, with the gauges of a running core, if there is one."""
        return EngineStats(
            **{name: getattr(core, name) for name in CORE_GAUGES},
            **{name: getattr(self, name) for name in FRONT_COUNTERS},
            **add_fields([*self.ended_cores.values(), core], CORE_COUNTERS),
            num_waiting=num_waiting,
            num_waiting_for_grammar=num_opening,
            kv_usage=1.0 - core.num_free_blocks / core.num_blocks if core.num_blocks else 0.0,
            finished=dict(self.finished),
            drafts=reduce(add_counts, (each.drafts for each in (*self.ended_cores.values(), core))),
            histograms=self.histograms(),
        )

    def histograms(self) -> dict[str, Histogram]:
        """Return copies of all histograms, by name in Prometheus."""
        return {name: each.copy() for name, each in self._histograms.items()}


def add_counts(one: dict[str, SourceCounts], other: dict[str, SourceCounts]) -> dict[str, SourceCounts]:
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
    prompt_tokens_cached: Annotated[int, "counter", "prompt_tokens_cached",
        "Prompt tokens that requests found in the prefix cache."] = 0
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
    num_grammars_cached: Annotated[int, "gauge", "grammars_cached", "Compiled grammars that are kept."] = 0
    num_grammars_retired: Annotated[int, "counter", "grammars_retired",
        "Compiled grammars dropped for newer ones, or because they had grown."] = 0
    dead_ends_no_token: Annotated[int, "counter", "dead_ends_no_token",
        "Completions whose grammar and sampling parameters together allowed no token."] = 0
    dead_ends_limit: Annotated[int, "counter", "dead_ends_limit",
        "Completions whose grammar met a limit of its engine."] = 0
    dead_ends_slow: Annotated[int, "counter", "dead_ends_slow",
        "Completions whose grammar took too much processor time."] = 0
    num_preemptions: Annotated[int, "counter", "num_preemptions",
        "Times a running request lost its blocks."] = 0
    num_steps: Annotated[int, "counter", "engine_steps", "Steps of the engine."] = 0
    num_step_tokens: Annotated[int, "counter", "engine_step_tokens", "Tokens computed in these steps."] = 0
    num_rejected: Annotated[int, "counter", "admission_rejections",
        "Requests refused because the queue was full."] = 0
    num_restarts: Annotated[int, "counter", "engine_restarts", "Restarts after a crash."] = 0
    num_resumed: Annotated[int, "counter", "requests_resumed", "Requests that another replica continued."] = 0
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
    return {name: sum(getattr(each, name) for each in parts) for name in names}


def _list_fields(kind: Kind, is_core: bool) -> tuple[str, ...]:
    found = [name for name, its_kind, *_ in list_metrics() if its_kind == kind]
    return tuple(name for name in found if hasattr(NO_CORE, name) is is_core)


CORE_COUNTERS, FRONT_COUNTERS = _list_fields("counter", True), _list_fields("counter", False)
CORE_GAUGES = _list_fields("gauge", True)
