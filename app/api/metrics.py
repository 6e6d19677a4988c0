"""EngineStats as Prometheus metrics: vLLM's names with the prefix `troupe:`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from engine import Engine, EngineStats

PREFIX = "troupe:"
LABELS = ("model_name", "engine")
Values = Mapping[Any, float]  # by a tuple of the labels behind LABELS
STATES = (
    "starting", "ready", "restarting", "falling_asleep", "sleeping", "waking_up", "dead", "closed",
)  # fmt: skip
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")  # by sleep level

# name, EngineStats field, help
GAUGES = (
    ("num_requests_running", "num_running", "Requests in the running batch."),
    ("num_requests_waiting", "num_waiting", "Requests that wait to be scheduled."),
    ("num_requests_waiting_for_grammar", "num_waiting_for_grammar", "Requests that wait for a grammar."),
    ("kv_cache_usage_perc", "kv_usage", "Share of the KV blocks in use; 1 is all of them."),
    ("kv_cache_blocks", "num_blocks", "KV cache blocks."),
    ("kv_cache_free_blocks", "num_free_blocks", "KV cache blocks no request owns."),
    ("kv_cache_cached_blocks", "num_cached_blocks", "KV cache blocks that a prefix can be found in."),
)
COUNTERS = (
    ("prompt_tokens", "prompt_tokens", "Prompt tokens processed."),
    ("generation_tokens", "generation_tokens", "Tokens generated."),
    ("prefix_cache_queries", "prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    ("prefix_cache_hits", "prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    (
        "prefix_cache_stateless",
        "prefix_cache_stateless",
        "Prompt tokens whose KV was found, but not used: no state was kept there.",
    ),
    (
        "prefix_cache_windowless",
        "prefix_cache_windowless",
        "Prompt tokens whose KV was found, but not used: blocks of a group with a window were evicted.",
    ),
    ("kv_offload_loads", "kv_offload_loads", "Tokens of these hits copied back from host memory."),
    ("kv_transfer_prefills", "num_prefills", "Prompts that went to a prefill replica first."),
    ("kv_transfer_received_tokens", "kv_received_tokens", "Tokens loaded from the store of several cores."),
    ("kv_transfer_saved_tokens", "kv_saved_tokens", "Tokens saved in the store of several cores."),
    ("num_preemptions", "num_preemptions", "Times a running request lost its blocks."),
    ("engine_steps", "num_steps", "Steps of the engine."),
    ("admission_rejections", "num_rejected", "Requests refused because the queue was full."),
    ("engine_restarts", "num_restarts", "Restarts after a crash."),
    ("requests_resumed", "num_resumed", "Requests that another replica continued."),
    (
        "requests_resumed_inexact",
        "num_resumed_inexact",
        "Requests that a replica with other weights, dtype or kernels continued.",
    ),
)
# name, ReplicaStats field, help; one value per replica
REPLICA_GAUGES = (
    ("replica_requests", "num_requests", "Requests sent to the replica and not finished."),
    ("replica_requests_running", "num_running", "Requests in the replica's running batch."),
    ("replica_kv_cache_usage_perc", "kv_usage", "Share of the replica's KV blocks in use; 1 is all of them."),
    ("replica_restarts", "num_restarts", "Restarts of the replica's process."),
)
HISTOGRAM_HELP = {
    "time_to_first_token_seconds": "From arrival to the first token.",
    "inter_token_latency_seconds": "Between two tokens of a request.",
    "e2e_request_latency_seconds": "From arrival to the end.",
    "request_queue_time_seconds": "From arrival to the first step.",
    "step_gap_seconds": (
        "From the end of a step behind which no other was queued to the start of the next, while there was work: "
        "how long the device waited. Steps that follow each other without such a gap are not counted."
    ),
    "event_loop_lag_seconds": "How late the event loop wakes up.",
    "grammar_compile_seconds": "Compiling one grammar.",
    "grammar_mask_seconds": "Filling the masks of one step.",
}


class EngineCollector(Collector):
    """Reads a snapshot of the engine whenever Prometheus asks."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def collect(self) -> Iterator[Metric]:
        """Yield every metric family of one snapshot."""
        stats, state, depth = self.engine.stats(), self.engine.state, self.engine.sleep_level
        for name, field, text in GAUGES:
            yield self._gauge(name, text, {(): getattr(stats, field)})
        for name, field, text in COUNTERS:
            yield self._counter(name, text, {(): getattr(stats, field)})
        finished = {(reason,): count for reason, count in stats.finished.items()}
        yield self._counter("request_success", "Finished requests by reason.", finished, "finished_reason")
        states = {(name,): state == name for name in STATES}
        yield self._gauge("engine_state", "1 for the engine's state.", states, "state")
        sleeps = {(name,): depth == level for level, name in enumerate(SLEEP_STATES)}
        yield self._gauge("engine_sleep_state", "1 for how deep the engine sleeps.", sleeps, "sleep_state")
        yield from self._drafts(stats)
        yield from self._replicas()
        yield from self._histograms(stats)

    def _gauge(self, name: str, text: str, values: Values, *labels: str) -> Metric:
        return self._fill(GaugeMetricFamily(PREFIX + name, text, labels=(*LABELS, *labels)), values)

    def _counter(self, name: str, text: str, values: Values, *labels: str) -> Metric:
        return self._fill(CounterMetricFamily(PREFIX + name, text, labels=(*LABELS, *labels)), values)

    def _fill(self, family: GaugeMetricFamily | CounterMetricFamily, values: Values) -> Metric:
        for labels, value in values.items():
            family.add_metric((self.engine.model_name, "0", *labels), float(value))
        return family

    def _replicas(self) -> Iterator[Metric]:
        """Yield one value per replica, whose number is the label `engine`."""
        replicas = self.engine.describe_replicas()
        rows = [
            ("replica_ready", "1 if the replica accepts requests.", [r.state == "ready" for r in replicas])
        ]
        rows += [(name, text, [getattr(r, field) for r in replicas]) for name, field, text in REPLICA_GAUGES]
        for name, text, values in rows if replicas else ():
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=LABELS)
            for replica, value in zip(replicas, values, strict=True):
                gauge.add_metric((self.engine.model_name, str(replica.index)), float(value))
            yield gauge

    def _drafts(self, stats: EngineStats) -> Iterator[Metric]:
        """Yield the counters of speculative decoding, by source of the drafts."""
        drafts = {(name,): each.num_drafts for name, each in stats.drafts.items()}
        tokens = {(name,): each.num_draft_tokens for name, each in stats.drafts.items()}
        accepted = {(name,): sum(each.accepted_per_position) for name, each in stats.drafts.items()}
        positions = {
            (name, str(position)): count
            for name, each in stats.drafts.items()
            for position, count in enumerate(each.accepted_per_position)
        }
        kind = "spec_decode_num_"
        yield self._counter(f"{kind}drafts", "Verified drafts.", drafts, "source")
        yield self._counter(f"{kind}draft_tokens", "Tokens of verified drafts.", tokens, "source")
        yield self._counter(f"{kind}accepted_tokens", "Accepted draft tokens.", accepted, "source")
        text = "Accepted draft tokens by position in the draft."
        yield self._counter(f"{kind}accepted_tokens_per_pos", text, positions, "source", "position")

    def _histograms(self, stats: EngineStats) -> Iterator[Metric]:
        for name, histogram in stats.histograms.items():
            family = HistogramMetricFamily(PREFIX + name, HISTOGRAM_HELP.get(name, name), labels=LABELS)
            # Prometheus counts every value in all buckets above it, too
            bounds = (*map(str, histogram.buckets), "+Inf")
            buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
            family.add_metric((self.engine.model_name, "0"), buckets, histogram.sum)
            yield family


def make_registry(engine: Engine) -> CollectorRegistry:
    """Return a separate registry, so that two servers in one process do not conflict."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(EngineCollector(engine))
    return registry
