"""EngineStats as Prometheus metrics: vLLM's names with the prefix `troupe:`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from engine import Engine, EngineStats, list_metrics

PREFIX = "troupe:"
LABELS = ("model_name", "engine")
Values = Mapping[Any, float]  # by a tuple of the labels behind LABELS
STATES = (
    "starting", "ready", "restarting", "falling_asleep", "sleeping", "waking_up", "dead", "closed",
)  # fmt: skip
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")  # by sleep level

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
        for field, kind, name, text in list_metrics():
            make = self._gauge if kind == "gauge" else self._counter
            yield make(name, text, {(): getattr(stats, field)})
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
